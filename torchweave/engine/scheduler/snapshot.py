"""The snapshot of the engine that a policy decides on. Nothing here changes any state."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import DecodeRequests, PrefillRequest, Snapshot, WaitingRequest
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.running_set import RunningSet


class LazySequence(Sequence[WaitingRequest]):
    """Waiting requests, each evaluated when the policy reads it: most policies stop at the first that does not fit."""

    def __init__(self, requests: Iterator[WaitingRequest]) -> None:
        self._requests = requests
        self._loaded: list[WaitingRequest] = []

    def __len__(self) -> int:
        self._loaded.extend(self._requests)
        return len(self._loaded)

    @overload
    def __getitem__(self, index: int) -> WaitingRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WaitingRequest]: ...
    def __getitem__(self, index: int | slice) -> WaitingRequest | Sequence[WaitingRequest]:
        begin, end = (index.start or 0, index.stop) if isinstance(index, slice) else (index, index + 1)
        count = sys.maxsize if end is None or min(begin, end) < 0 else end  # all, for indices from the end
        self._loaded.extend(itertools.islice(self._requests, max(count - len(self._loaded), 0)))
        return self._loaded[index]


def blocks_needed(running: RunningSet, kv: BlockManager, query_len: int) -> np.ndarray:
    """Logical blocks that each decode request needs for its next step; groups are last.

    Args:
        query_len: most tokens of a row.
    """
    decoding, slots, groups = running.decoding, running.slots, running.decoding_groups
    if not (decoding.size or groups):
        return np.zeros(0, np.int64)
    after = slots.num_computed[decoding] + 1
    if query_len > 1:
        sizes = np.where(slots.drafting[decoding], query_len, 1)
        after = np.minimum(slots.num_computed[decoding] + sizes, slots.limit[decoding])
    needed = kv.blocks_needed(decoding, after)
    if groups:
        needed = np.append(needed, [group.blocks_needed(slots, kv) for group in groups])
    return needed


def take_snapshot(
    limits: Limits,
    running: RunningSet,
    kv: BlockManager,
    needed: np.ndarray,
    waiting: Iterable[RequestState],
    find_prefix: Callable[[RequestState], PrefixHit],
    in_step: np.ndarray | None = None,
) -> Snapshot:
    """The state before a step.

    Args:
        needed: from `blocks_needed`.
        find_prefix: returns a request's cached prefix.
        in_step: bool, which of the decode slots the step runs; None: all.
    """
    slots, exclusive = running.slots, kv.exclusive_logical_blocks
    pending = [each for slot in running.pending_release for each in running.slots_of(slot)]
    return Snapshot(
        max_num_tokens=limits.max_num_tokens,
        free_slots=len(slots.free),
        used_slots=len(slots.slot_of),
        block_size=kv.block_size,
        free_blocks=kv.free_logical_blocks,
        unreserved_blocks=kv.unreserved_logical_blocks,
        pending_free_blocks=kv.num_freeable(pending),
        decode=_decode_requests(running, kv, needed, exclusive, in_step),
        prefill=tuple(_prefill_request(running, kv, slot, int(exclusive[slot])) for slot in running.prefill),
        waiting=LazySequence(_waiting_requests(limits, kv, len(slots.free), waiting, find_prefix)),
        chunked_context=limits.chunked_context,
        equal_progress=limits.equal_progress,
        mixed_step_sizes=limits.mixed_step_sizes,
    )


def _decode_requests(
    running: RunningSet, kv: BlockManager, needed: np.ndarray, exclusive: np.ndarray, in_step: np.ndarray | None
) -> DecodeRequests:
    if not needed.size:
        return DecodeRequests()
    slots, decoding, groups = running.slots, running.decoding, running.decoding_groups
    held_blocks, start_order = exclusive[decoding], slots.start_order[decoding]
    rows = None if in_step is None else in_step.astype(np.int64)
    if not groups:
        return DecodeRequests(needed, held_blocks, start_order, rows)
    ones = np.ones(len(decoding), np.int64)
    return DecodeRequests(
        needed,
        np.append(held_blocks, [kv.num_freeable(group.slots) for group in groups]),
        np.append(start_order, [slots.start_order[group.leader] for group in groups]),
        np.append(ones if rows is None else rows, [group.num_rows for group in groups]),
        np.append(ones, [len(group.slots) for group in groups]),
    )


def _prefill_request(running: RunningSet, kv: BlockManager, slot: int, held_blocks: int) -> PrefillRequest:
    slots = running.slots
    remaining_tokens = slots.remaining_prefill(slot) if kv.ready(slot) else 0
    free_tokens = int(kv.held_blocks[slot]) * kv.block_size - int(slots.num_computed[slot])
    if (group := running.group_of(slot)) is not None:
        held_blocks = kv.num_freeable(group.slots)
    start_order = int(slots.start_order[slot])
    return PrefillRequest(remaining_tokens, min(remaining_tokens, free_tokens), held_blocks, start_order)


def _waiting_requests(
    limits: Limits,
    kv: BlockManager,
    num_slots: int,
    waiting: Iterable[RequestState],
    find_prefix: Callable[[RequestState], PrefixHit],
) -> Iterator[WaitingRequest]:
    """Requests that could start in this step."""
    tokens = limits.max_num_tokens
    for state in waiting:
        num_slots -= state.request.sampling.beam_width
        if num_slots < 0:
            return
        hit = find_prefix(state)
        remaining_tokens = state.prefill_len - hit.num_blocks * kv.block_size
        # Shared blocks that leave a window save nothing from then on, so `referenced` counts the other groups only.
        max_blocks = -((hit.referenced - limits.max_blocks_needed(state.request, kv)) // kv.num_groups)
        hit_blocks = -(-(hit.unreferenced + hit.on_host) // kv.num_groups)
        yield WaitingRequest(remaining_tokens, max_blocks, hit_blocks)
        tokens -= remaining_tokens
        if tokens <= 0 and not limits.equal_progress:
            return
