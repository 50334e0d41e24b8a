"""Shows a policy the state of the engine, and carries out nothing: the batch does what it decides."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.scheduler.beams import BeamGroup
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import (
    Decision,
    DecodeRequests,
    Policy,
    PrefillRequest,
    Snapshot,
    WaitingRequest,
)
from torchweave.engine.scheduler.policies.prefill_delay import should_delay_prefill
from torchweave.engine.scheduler.prompt_logprobs import max_reusable_tokens
from torchweave.engine.scheduler.request_state import RequestState, WaitingQueue
from torchweave.engine.scheduler.running_set import RunningSet


class _LazySequence(Sequence[WaitingRequest]):
    """Requests that could start, each looked at when the policy comes to it: most stop at the first for which there is no room."""

    def __init__(self, found: Iterator[WaitingRequest]) -> None:
        self._found = found
        self._loaded: list[WaitingRequest] = []

    def __len__(self) -> int:
        self._loaded.extend(self._found)
        return len(self._loaded)

    @overload
    def __getitem__(self, index: int) -> WaitingRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WaitingRequest]: ...
    def __getitem__(self, index: int | slice) -> WaitingRequest | Sequence[WaitingRequest]:
        begin, end = (index.start or 0, index.stop) if isinstance(index, slice) else (index, index + 1)
        count = (
            sys.maxsize if end is None or min(begin, end) < 0 else end
        )  # all, where something is counted from the end
        self._loaded.extend(itertools.islice(self._found, max(count - len(self._loaded), 0)))
        return self._loaded[index]


class PolicyAdapter:
    """Asks the policy what the next step holds.

    Args:
        limits: sizes, and how the tokens of a step are divided.
        policy: decides which waiting requests start, which running ones are paused, and how much of each prompt is read.
        running: the slots in use.
    """

    def __init__(self, limits: Limits, policy: Policy, running: RunningSet) -> None:
        self._limits = limits
        self._policy = policy
        self._running = running
        self._kv = running.kv
        self._slots = running.slots
        self._delayed_steps = 0  # steps that prompts have been held back

    def decide(self, waiting: WaitingQueue) -> Decision | None:
        """The policy's decision about the running requests and those that wait for a slot; None when there is nothing to
        decide: all generate, and all have the blocks they need."""
        decoding, searches = self._running.decoding, self._running.beams.decoding()
        self._kv.free_out_of_window(decoding, self._slots.num_computed[decoding])
        if self._running.prefill:
            prefill = np.array(self._running.prefill)
            self._kv.free_out_of_window(prefill, self._slots.num_computed[prefill])
        blocks_needed = self._kv.blocks_needed(decoding, self._slots.num_computed[decoding] + 1)
        if searches:
            blocks_needed = np.append(blocks_needed, [self._running.beams.blocks_needed(group) for group in searches])
        if not waiting and not self._running.prefill and blocks_needed.sum() <= self._kv.free_logical_blocks:
            return None
        snapshot = self._snapshot(blocks_needed, searches, waiting)
        decision = self._policy(snapshot)
        if self._should_delay_prefill(snapshot):
            return Decision((0,) * len(snapshot.prefill), (), decision.skipped, decision.paused)
        return decision

    def find_prefix(self, state: RequestState) -> PrefixHit:
        """What is known of the beginning of a request's context, all of it but a token at least."""
        if not self._running.reuse:
            return PrefixHit()
        prefill = state.prefill if state.search is None else state.prompt  # beams change from step to step
        hashes = state.hashes(prefill[: max_reusable_tokens(state)], self._kv.block_size)
        state.match = self._kv.match(hashes, state.match)
        return state.match

    def _snapshot(self, blocks_needed: np.ndarray, searches: Sequence[BeamGroup], waiting: WaitingQueue) -> Snapshot:
        kv, slots, limits, running = self._kv, self._slots, self._limits, self._running
        own, decoding = kv.exclusive_logical_blocks, running.decoding
        decode = DecodeRequests(blocks_needed, own[decoding], slots.start_order[decoding])
        if searches:
            decode = self._with_searches(decode, searches)
        return Snapshot(
            max_num_tokens=limits.max_num_tokens,
            free_slots=len(slots.free),
            used_slots=len(slots.of),
            block_size=kv.block_size,
            free_blocks=kv.free_logical_blocks,
            unreserved_blocks=kv.unreserved_logical_blocks,
            pending_free_blocks=kv.num_freeable(self._slots_of(running.pending_release)),
            decode=decode,
            prefill=tuple(self._prefill_request(slot, int(own[slot])) for slot in running.prefill),
            waiting=_LazySequence(self._waiting_requests(waiting)),
            chunked_context=limits.chunked_context,
            equal_progress=limits.equal_progress,
            mixed_step_sizes=limits.mixed_step_sizes,
        )

    def _with_searches(self, others: DecodeRequests, searches: Sequence[BeamGroup]) -> DecodeRequests:
        beams, start_order, ones = (
            self._running.beams,
            self._slots.start_order,
            np.ones(len(others.held_blocks), np.int64),
        )
        return DecodeRequests(
            others.blocks_needed,
            np.append(others.held_blocks, [beams.held_blocks(group) for group in searches]),
            np.append(others.start_order, [start_order[group.leader] for group in searches]),
            np.append(ones, [group.num_rows for group in searches]),
            np.append(ones, [len(group.slots) for group in searches]),
        )

    def _slots_of(self, slots: Sequence[int]) -> list[int]:
        """All slots of the requests that are known by `slots`."""
        groups = self._running.beams.groups
        return [each for slot in slots for each in (groups[slot].slots if slot in groups else (slot,))]

    def _prefill_request(self, slot: int, own: int) -> PrefillRequest:
        kv, slots = self._kv, self._slots
        remaining_tokens = slots.remaining_prefill(slot) if kv.ready(slot) else 0
        allocated_tokens = min(
            remaining_tokens, int(kv.held_blocks[slot]) * kv.block_size - int(slots.num_computed[slot])
        )
        if (group := self._running.beams.of(slot)) is not None:
            own = self._running.beams.held_blocks(group)
        return PrefillRequest(remaining_tokens, allocated_tokens, own, int(slots.start_order[slot]))

    def _waiting_requests(self, waiting: WaitingQueue) -> Iterator[WaitingRequest]:
        """Those that could start in this step."""
        tokens, slots = self._limits.max_num_tokens, len(self._slots.free)
        for state in waiting:
            slots -= state.request.sampling.beam_width
            if slots < 0:
                return
            match = self.find_prefix(state)
            remaining_tokens = state.prefill_len - match.block_indices * self._kv.block_size
            # What a window gives back is no longer saved by having shared it; `referenced` counts the other groups only.
            most = -(
                (match.referenced - self._limits.max_blocks_needed(state.request, self._kv)) // self._kv.num_groups
            )
            yield WaitingRequest(
                remaining_tokens, most, -(-(match.unreferenced + match.on_host) // self._kv.num_groups)
            )
            tokens -= remaining_tokens
            if tokens <= 0 and not self._limits.equal_progress:
                return

    def _should_delay_prefill(self, snapshot: Snapshot) -> bool:
        limits = self._limits
        held_blocks = should_delay_prefill(
            snapshot, self._delayed_steps, limits.batch_wait_timeout_iters, limits.batch_wait_max_tokens_ratio
        )
        self._delayed_steps = self._delayed_steps + 1 if held_blocks else 0
        return held_blocks
