"""Run as many requests as the next step has blocks for; when blocks run out, pause the request that started last.

Source: MAX_UTILIZATION of TensorRT-LLM's batch manager. A paused request frees its blocks when the steps that contain it have
completed, and waits at the head of the queue; it resumes with its prompt and its generated tokens as the new prompt.

No starvation: the request that started first is never paused, and a request that cannot finish alone in an empty cache is rejected
on arrival. No thrashing: a waiting request starts only if a block is left for each running request, and not while paused
requests still hold blocks.
"""

from __future__ import annotations

import numpy as np

from torchweave.engine.scheduler.policies.admission import admit
from torchweave.engine.scheduler.policies.base import Decision, Snapshot


def max_utilization(snapshot: Snapshot) -> Decision:
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
        spare = snapshot.num_next_blocks + len(admitted)  # the next block of each running request
        size = _fitting_tokens(tokens, 0, blocks - request.hit_blocks - spare, snapshot)
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
