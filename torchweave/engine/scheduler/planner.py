"""Shows a policy the state of the engine, and carries out nothing: the batch does what it decides."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from torchweave.engine.kv_cache.prefix_index import Match
from torchweave.engine.sampling.prompt_logprobs import known_tokens
from torchweave.engine.scheduler.beams import Group
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import Context, Decision, Generation, Policy, Snapshot, Waiting
from torchweave.engine.scheduler.policies.prefill_delay import holds_back
from torchweave.engine.scheduler.request_state import Active, Queue
from torchweave.engine.scheduler.running_set import Running


class _OneByOne(Sequence[Waiting]):
    """Requests that could start, each looked at when the policy comes to it: most stop at the first for which there is no room."""

    def __init__(self, found: Iterator[Waiting]) -> None:
        self._found = found
        self._seen: list[Waiting] = []

    def __len__(self) -> int:
        self._seen.extend(self._found)
        return len(self._seen)

    @overload
    def __getitem__(self, index: int) -> Waiting: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Waiting]: ...
    def __getitem__(self, index: int | slice) -> Waiting | Sequence[Waiting]:
        begin, end = (index.start or 0, index.stop) if isinstance(index, slice) else (index, index + 1)
        count = (
            sys.maxsize if end is None or min(begin, end) < 0 else end
        )  # all, where something is counted from the end
        self._seen.extend(itertools.islice(self._found, max(count - len(self._seen), 0)))
        return self._seen[index]


class Planner:
    """Asks the policy what the next step holds.

    Args:
        limits: sizes, and how the tokens of a step are divided.
        policy: decides which waiting requests start, which running ones are paused, and how much of each prompt is read.
        running: the slots in use.
    """

    def __init__(self, limits: Limits, policy: Policy, running: Running) -> None:
        self._limits = limits
        self._policy = policy
        self._running = running
        self._kv = running.kv
        self._slots = running.slots
        self._held_for = 0  # steps that prompts have been held back

    def decide(self, waiting: Queue) -> Decision | None:
        """The policy's decision about the running requests and those that wait for a slot; None when there is nothing to
        decide: all generate, and all have the blocks they need."""
        generating, searches = self._running.generating, self._running.beams.generating()
        self._kv.slide(generating, self._slots.computed[generating])
        if self._running.context:
            context = np.array(self._running.context)
            self._kv.slide(context, self._slots.computed[context])
        lacking = self._kv.lacking(generating, self._slots.computed[generating] + 1)
        if searches:
            lacking = np.append(lacking, [self._running.beams.lacking(group) for group in searches])
        if not waiting and not self._running.context and lacking.sum() <= self._kv.free_columns:
            return None
        snapshot = self._snapshot(lacking, searches, waiting)
        decision = self._policy(snapshot)
        if self._holds_back(snapshot):
            return Decision((0,) * len(snapshot.context), (), decision.resting, decision.paused)
        return decision

    def known(self, active: Active) -> Match:
        """What is known of the beginning of a request's context, all of it but a token at least."""
        if not self._running.reuse:
            return Match()
        context = active.context if active.search is None else active.prompt  # beams change from step to step
        hashes = active.hashes(context[: known_tokens(active)], self._kv.block_size)
        active.match = self._kv.match(hashes, active.match)
        return active.match

    def _snapshot(self, lacking: np.ndarray, searches: Sequence[Group], waiting: Queue) -> Snapshot:
        kv, slots, limits, running = self._kv, self._slots, self._limits, self._running
        own, generating = kv.own_columns, running.generating
        generation = Generation(lacking, own[generating], slots.started[generating])
        if searches:
            generation = self._with_searches(generation, searches)
        return Snapshot(
            max_num_tokens=limits.max_num_tokens,
            free_slots=len(slots.free),
            taken_slots=len(slots.of),
            block_size=kv.block_size,
            free_blocks=kv.free_columns,
            unreserved_blocks=kv.unreserved_columns,
            leaving_blocks=kv.held_alone(self._slots_of(running.leaving)),
            generation=generation,
            context=tuple(self._context(slot, int(own[slot])) for slot in running.context),
            waiting=_OneByOne(self._waiting(waiting)),
            chunked_context=limits.chunked_context,
            equal_progress=limits.equal_progress,
            mixed_step_sizes=limits.mixed_step_sizes,
        )

    def _with_searches(self, others: Generation, searches: Sequence[Group]) -> Generation:
        beams, started, ones = self._running.beams, self._slots.started, np.ones(len(others.held), np.int64)
        return Generation(
            others.lacking,
            np.append(others.held, [beams.held(group) for group in searches]),
            np.append(others.started, [started[group.leader] for group in searches]),
            np.append(ones, [group.num_rows for group in searches]),
            np.append(ones, [len(group.slots) for group in searches]),
        )

    def _slots_of(self, slots: Sequence[int]) -> list[int]:
        """All slots of the requests that are known by `slots`."""
        groups = self._running.beams.groups
        return [each for slot in slots for each in (groups[slot].slots if slot in groups else (slot,))]

    def _context(self, slot: int, own: int) -> Context:
        kv, slots = self._kv, self._slots
        left = slots.context_left(slot) if kv.ready(slot) else 0
        room = min(left, int(kv.held[slot]) * kv.block_size - int(slots.computed[slot]))
        if (group := self._running.beams.of(slot)) is not None:
            own = self._running.beams.held(group)
        return Context(left, room, own, int(slots.started[slot]))

    def _waiting(self, waiting: Queue) -> Iterator[Waiting]:
        """Those that could start in this step."""
        tokens, slots = self._limits.max_num_tokens, len(self._slots.free)
        for active in waiting:
            slots -= active.request.sampling.beam_width
            if slots < 0:
                return
            match = self.known(active)
            left = active.context_len - match.columns * self._kv.block_size
            # What a window gives back is no longer saved by having shared it; `spared` counts the other groups only.
            most = -((match.spared - self._limits.most_blocks(active.request, self._kv)) // self._kv.num_groups)
            yield Waiting(left, most, -(-(match.revived + match.restored) // self._kv.num_groups))
            tokens -= left
            if tokens <= 0 and not self._limits.equal_progress:
                return

    def _holds_back(self, snapshot: Snapshot) -> bool:
        limits = self._limits
        held = holds_back(snapshot, self._held_for, limits.batch_wait_timeout_iters, limits.batch_wait_max_tokens_ratio)
        self._held_for = self._held_for + 1 if held else 0
        return held
