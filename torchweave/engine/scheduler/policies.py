"""Capacity policies: pure functions from a `Snapshot` to a `Decision`, which can be simulated without a model.

Every policy admits prompts alike (`admit`): FIRST_COME_FIRST_SERVED and EQUAL_PROGRESS of TensorRT-LLM's context chunking, its
`batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio`, and the stall-free batching of Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DecodeRequests:
    """Decode requests, one entry each. A request takes one token per step, a beam search one per beam.

    Attributes:
        blocks_needed: blocks that the request needs for its next step.
        held_blocks: lower bound of the blocks that are freed if only this request is paused.
        start_order: smaller for an earlier start.
        rows: tokens in this step, 0 for a search whose last result is pending and for another micro-batch; None: 1 each.
        width: most tokens in a step; None: 1 each.
    """

    blocks_needed: np.ndarray = field(default_factory=lambda: _EMPTY)
    held_blocks: np.ndarray = field(default_factory=lambda: _EMPTY)
    start_order: np.ndarray = field(default_factory=lambda: _EMPTY)
    rows: np.ndarray | None = None
    width: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.blocks_needed)

    @property
    def num_tokens(self) -> int:
        return len(self) if self.rows is None else int(self.rows.sum())

    @property
    def num_slots(self) -> int:
        return len(self) if self.width is None else int(self.width.sum())


@dataclass(frozen=True)
class PrefillRequest:
    """A running request in prefill.

    Attributes:
        remaining_tokens: prompt tokens left to prefill.
        allocated_tokens: those of them that fit into the request's blocks.
        held_blocks, start_order: as in `DecodeRequests`.
    """

    remaining_tokens: int
    allocated_tokens: int = 0
    held_blocks: int = 0
    start_order: int = 0


@dataclass(frozen=True)
class WaitingRequest:
    """A request without blocks: new or paused.

    Attributes:
        remaining_tokens: tokens to prefill, without the cached prefix.
        max_blocks: most free blocks that it takes until its end.
        hit_blocks: those of them that hold its cached prefix and are taken at its start.
    """

    remaining_tokens: int
    max_blocks: int
    hit_blocks: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The state of the engine before a step.

    Attributes:
        max_num_tokens: most tokens in the step.
        free_slots: slots for waiting requests.
        used_slots: requests that run or have their last step in flight.
        block_size: tokens per block.
        free_blocks: blocks that can be granted now.
        unreserved_blocks: those of them that no running request may need.
        pending_free_blocks: blocks that are freed when the steps in flight have completed.
        decode, prefill: running requests; prefill requests oldest first.
        waiting: waiting requests that have slots, in the order of their start. The cost of reading an entry grows with the
            request's cached prefix, so read no further than necessary.
        chunked_context: a prompt may be split over several steps.
        equal_progress: prompts that do not fit together each advance by a part; else the oldest is first.
        mixed_step_sizes: see `step_token_budget`.
    """

    max_num_tokens: int
    free_slots: int
    block_size: int
    free_blocks: int
    unreserved_blocks: int
    pending_free_blocks: int = 0
    used_slots: int = 0
    decode: DecodeRequests = field(default_factory=DecodeRequests)
    prefill: tuple[PrefillRequest, ...] = ()
    waiting: Sequence[WaitingRequest] = ()
    chunked_context: bool = True
    equal_progress: bool = False
    mixed_step_sizes: tuple[int, ...] = ()

    @property
    def num_next_blocks(self) -> int:
        """Blocks that the running requests need sooner or later: one for each token of a step."""
        return self.decode.num_slots + len(self.prefill)


@dataclass(frozen=True)
class Decision:
    """The content of a step.

    Attributes:
        chunks: prompt tokens of each running prefill request, in the snapshot's order.
        admitted: the same for the first `len(admitted)` waiting requests, which start.
        skipped: indices of decode requests that skip this step, because a block they need is not free yet.
        paused: indices of running requests, decode before prefill, that free all blocks and wait.
    """

    chunks: tuple[int, ...]
    admitted: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()


Policy = Callable[[Snapshot], Decision]


_SHARE = 16
"""A mixed step prefills at least a sixteenth of the waiting prompt tokens, so a queue of prompts shrinks as fast as it grows. A
larger share would empty a short queue a little sooner and delay every decode request."""


def admit(snapshot: Snapshot, num_fitting: int) -> Decision:
    """Continue prefills, and start those of the first `num_fitting` waiting requests for which the step has tokens left."""
    remaining_tokens = [request.remaining_tokens for request in snapshot.prefill]
    remaining_tokens += [request.remaining_tokens for request in snapshot.waiting[:num_fitting]]
    num_decoding = snapshot.decode.num_tokens
    steps = snapshot.mixed_step_sizes if snapshot.chunked_context else ()
    sizes = chunk_sizes(
        remaining_tokens,
        step_token_budget(snapshot.max_num_tokens, steps, num_decoding, sum(remaining_tokens)) - num_decoding,
        chunked=snapshot.chunked_context,
        equal=snapshot.equal_progress,
        unit=snapshot.block_size,
    )
    running, starting = sizes[: len(snapshot.prefill)], sizes[len(snapshot.prefill) :]
    if 0 in starting:
        starting = starting[: starting.index(0)]
    return Decision(tuple(running), tuple(starting))


def chunk_sizes(remaining_tokens: Sequence[int], budget: int, *, chunked: bool, equal: bool, unit: int) -> list[int]:
    """Tokens of each prompt in a step, oldest prompt first.

    Args:
        remaining_tokens: tokens left to prefill, by prompt.
        budget: prompt tokens that fit into the step.
        chunked: prompts may be split; else each is prefilled in one step.
        equal: with `chunked`, all prompts advance by the same number of tokens: a multiple of `unit`, except a last chunk.
        unit: block size in tokens.
    """
    if chunked and equal and sum(remaining_tokens) > budget:
        return _equal_progress(remaining_tokens, budget, unit)
    sizes = []
    for tokens in remaining_tokens:
        size = min(tokens, budget) if chunked else (tokens if tokens <= budget else 0)
        sizes.append(max(size, 0))
        budget -= sizes[-1]
    return sizes


def _equal_progress(remaining_tokens: Sequence[int], budget: int, unit: int) -> list[int]:
    """A unit each in turn, oldest first, until the budget is used up."""
    sizes = [0] * len(remaining_tokens)
    unfinished = list(range(len(remaining_tokens)))
    while unfinished and budget > 0:
        rounds = max(budget // (unit * len(unfinished)), 1)  # whole rounds at once
        for index in list(unfinished):
            size = min(unit * rounds, remaining_tokens[index] - sizes[index], budget)
            sizes[index] += size
            budget -= size
            if sizes[index] == remaining_tokens[index]:
                unfinished.remove(index)
    return sizes


def step_token_budget(max_tokens: int, sizes: Sequence[int], num_decoding: int, backlog: int) -> int:
    """Tokens of the next step, decode tokens included: few enough that decode requests are hardly slowed down.

    A GPU runs a step of a few hundred tokens in little more time than a decode step, because both read all weights once; a whole
    prompt in one step would stall every decode request.

    Args:
        max_tokens: most tokens in a step.
        sizes: sizes to choose from, ascending, at least half of the first one for prompts; empty: always `max_tokens`.
        num_decoding: rows that take one token each.
        backlog: prompt tokens that could be prefilled now; from `max_tokens` on, only throughput counts.
    """
    if not sizes or not num_decoding or backlog >= max_tokens:
        return max_tokens
    tokens = num_decoding + max(sizes[0] // 2, backlog // _SHARE)
    at = bisect_left(sizes, tokens)
    return min(sizes[at], max_tokens) if at < len(sizes) else max_tokens


def should_delay_prefill(
    snapshot: Snapshot, num_delayed_steps: int, timeout_iters: int, max_tokens_ratio: float
) -> bool:
    """Whether the step should leave prompts out, so that later ones join them and fill a step better.

    Prompts are delayed only while a request decodes.

    Args:
        num_delayed_steps: consecutive steps that the prompts were delayed so far.
        timeout_iters: most steps of delay; 0: no delay.
        max_tokens_ratio: prompts that fill this part of a step are not delayed.
    """
    if not len(snapshot.decode) or num_delayed_steps >= timeout_iters:
        return False
    tokens = sum(request.remaining_tokens for request in (*snapshot.prefill, *snapshot.waiting))
    return snapshot.decode.num_tokens + tokens < max_tokens_ratio * snapshot.max_num_tokens


def guaranteed_no_evict(snapshot: Snapshot) -> Decision:
    """Reserve the blocks that each running request needs to its end, and pause none.

    Source: GUARANTEED_NO_EVICT of TensorRT-LLM's batch manager. Requests are admitted first come, first served, while the most
    blocks that they may need are unreserved. The first request that does not fit stops admission, so that small requests cannot
    overtake a large one forever.
    """
    blocks = snapshot.unreserved_blocks
    num_fitting = 0
    for request in snapshot.waiting:
        if request.max_blocks > blocks:
            break
        blocks -= request.max_blocks
        num_fitting += 1
    return admit(snapshot, num_fitting)


def max_utilization(snapshot: Snapshot) -> Decision:
    """Run as many requests as the next step has blocks for; when blocks run out, pause the request that started last.

    Source: MAX_UTILIZATION of TensorRT-LLM's batch manager. A paused request frees its blocks when the steps that contain it have
    completed, and waits at the head of the queue; it resumes with its prompt and its generated tokens as the new prompt.

    No starvation: the request that started first is never paused, and a request that cannot finish alone in an empty cache is
    rejected on arrival. No thrashing: a waiting request starts only if a block is left for each running request, and not while
    paused requests still hold blocks.
    """
    decode, prefill = snapshot.decode, snapshot.prefill
    paused = _to_pause(snapshot)
    skipped = _to_skip(snapshot, paused)
    runs = np.ones(len(decode), bool)
    runs[[*skipped, *(index for index in paused if index < len(decode))]] = False
    blocks = snapshot.free_blocks - int(decode.blocks_needed[runs].sum())

    full = paused or snapshot.pending_free_blocks or blocks <= snapshot.num_next_blocks
    decision = admit(snapshot, 0 if full else len(snapshot.waiting))
    chunks = []
    for index, (request, tokens) in enumerate(zip(prefill, decision.chunks, strict=True), start=len(decode)):
        size = 0 if index in paused else _fitting_tokens(tokens, request.allocated_tokens, blocks, snapshot)
        blocks -= _num_blocks(size - request.allocated_tokens, snapshot)
        chunks.append(size)
    admitted = []
    for request, tokens in zip(snapshot.waiting, decision.admitted, strict=False):
        reserved = snapshot.num_next_blocks + len(admitted)  # the next block of each running request
        size = _fitting_tokens(tokens, 0, blocks - request.hit_blocks - reserved, snapshot)
        if not size:
            break
        blocks -= request.hit_blocks + _num_blocks(size, snapshot)
        admitted.append(size)
    return Decision(tuple(chunks), tuple(admitted), skipped, tuple(sorted(paused)))


def _to_pause(snapshot: Snapshot) -> set[int]:
    """Pause from the last start on, until free and pending blocks cover a token of each other request."""
    decode, prefill = snapshot.decode, snapshot.prefill
    needs = _join(decode.blocks_needed, [int(request.allocated_tokens == 0) for request in prefill])
    shortage = int(needs.sum()) - snapshot.free_blocks - snapshot.pending_free_blocks
    if shortage <= 0:
        return set()
    held_blocks = _join(decode.held_blocks, [request.held_blocks for request in prefill])
    start_order = _join(decode.start_order, [request.start_order for request in prefill])
    paused: set[int] = set()
    for index in np.argsort(-start_order, kind="stable")[:-1].tolist():  # never the request that started first
        paused.add(index)
        shortage -= int(needs[index] + held_blocks[index])
        if shortage <= 0:
            break
    return paused


def _join(decode: np.ndarray, prefill: list[int]) -> np.ndarray:
    return np.concatenate([decode, prefill]).astype(np.int64)


def _to_skip(snapshot: Snapshot, paused: set[int]) -> tuple[int, ...]:
    """Decode requests whose next block is not free yet: those that started last."""
    blocks_needed, blocks = snapshot.decode.blocks_needed, snapshot.free_blocks
    if blocks_needed.sum() <= blocks:
        return ()
    skipped = []
    for index in np.argsort(snapshot.decode.start_order, kind="stable").tolist():
        if index in paused:
            continue
        if blocks_needed[index] > blocks:
            skipped.append(index)
        else:
            blocks -= int(blocks_needed[index])
    return tuple(sorted(skipped))


def _fitting_tokens(tokens: int, allocated_tokens: int, blocks: int, snapshot: Snapshot) -> int:
    """The part of a chunk that fits into `blocks` and the allocated room; all or nothing without chunked context."""
    size = min(tokens, allocated_tokens + max(blocks, 0) * snapshot.block_size)
    return size if snapshot.chunked_context or size == tokens else 0


def _num_blocks(tokens: int, snapshot: Snapshot) -> int:
    return max(-(-tokens // snapshot.block_size), 0)


def static_batch(snapshot: Snapshot) -> Decision:
    """Start and end a batch as a whole: no request joins while one of the batch runs.

    Source: V1 batching of TensorRT-LLM's batch manager. Blocks are reserved as in `guaranteed_no_evict`.
    """
    if snapshot.used_slots:
        return guaranteed_no_evict(replace(snapshot, waiting=()))
    return guaranteed_no_evict(snapshot)


POLICIES: dict[str, Policy] = {
    "guaranteed_no_evict": guaranteed_no_evict,
    "max_utilization": max_utilization,
    "static_batch": static_batch,
}
