"""As many requests as the next step has blocks for; when blocks run out, the request that started last is paused.

Source: MAX_UTILIZATION of TensorRT-LLM's batch manager. A paused request gives its blocks back when the steps that name it have
completed, and waits at the head of the queue; it resumes with its prompt and what it has generated as context.

Nothing starves: the request that started first is paused by nobody, and a request that cannot end alone in an empty cache is
refused at the door. Nothing flaps: a waiting request starts only where a block is left for everyone who runs, and not while
paused requests still hold theirs.
"""

from __future__ import annotations

import numpy as np

from torchweave.engine.scheduler.policies.base import Decision, Snapshot
from torchweave.engine.scheduler.policies.guaranteed_no_evict import admit


def max_utilization(snapshot: Snapshot) -> Decision:
    decode, prefill = snapshot.decode, snapshot.prefill
    paused = _to_pause(snapshot)
    skipped = _to_skip(snapshot, paused)
    going = np.ones(len(decode), bool)
    going[[*skipped, *(index for index in paused if index < len(decode))]] = False
    blocks = snapshot.free_blocks - int(decode.blocks_needed[going].sum())

    full = paused or snapshot.pending_free_blocks or blocks <= snapshot.num_next_blocks
    decision = admit(snapshot, 0 if full else len(snapshot.waiting))
    chunks = []
    for index, (request, wanted) in enumerate(zip(prefill, decision.chunks, strict=True), start=len(decode)):
        size = 0 if index in paused else _fitting_tokens(wanted, request.allocated_tokens, blocks, snapshot)
        blocks -= _blocks(size - request.allocated_tokens, snapshot)
        chunks.append(size)
    admitted = []
    for request, wanted in zip(snapshot.waiting, decision.admitted, strict=False):
        spare = snapshot.num_next_blocks + len(admitted)  # the next block of everyone who runs
        size = _fitting_tokens(wanted, 0, blocks - request.hit_blocks - spare, snapshot)
        if not size:
            break
        blocks -= request.hit_blocks + _blocks(size, snapshot)
        admitted.append(size)
    return Decision(tuple(chunks), tuple(admitted), skipped, tuple(sorted(paused)))


def _to_pause(snapshot: Snapshot) -> set[int]:
    """Those that started last, until what is free and comes free is enough for a token of everyone else."""
    decode, prefill = snapshot.decode, snapshot.prefill
    needs = np.concatenate([decode.blocks_needed, [int(request.allocated_tokens == 0) for request in prefill]]).astype(
        np.int64
    )
    supply = snapshot.free_blocks + snapshot.pending_free_blocks
    short = int(needs.sum()) - supply
    if short <= 0:
        return set()
    held_blocks = np.concatenate([decode.held_blocks, [request.held_blocks for request in prefill]]).astype(np.int64)
    start_order = np.concatenate([decode.start_order, [request.start_order for request in prefill]])
    paused: set[int] = set()
    for index in np.argsort(-start_order, kind="stable")[:-1].tolist():  # never the one that started first
        paused.add(index)
        short -= int(needs[index] + held_blocks[index])
        if short <= 0:
            break
    return paused


def _to_skip(snapshot: Snapshot, paused: set[int]) -> tuple[int, ...]:
    """Generation requests whose next block is not free yet: those that started last."""
    blocks_needed = snapshot.decode.blocks_needed
    skipped = []
    blocks = snapshot.free_blocks
    for index in (
        np.argsort(snapshot.decode.start_order, kind="stable").tolist() if blocks_needed.sum() > blocks else ()
    ):
        if index in paused:
            continue
        if blocks_needed[index] > blocks:
            skipped.append(index)
        else:
            blocks -= int(blocks_needed[index])
    return tuple(sorted(skipped))


def _fitting_tokens(wanted: int, allocated_tokens: int, blocks: int, snapshot: Snapshot) -> int:
    """As much of a chunk as fits into `blocks` and the room that is left; all or nothing where chunks are off."""
    size = min(wanted, allocated_tokens + max(blocks, 0) * snapshot.block_size)
    return size if snapshot.chunked_context or size == wanted else 0


def _blocks(tokens: int, snapshot: Snapshot) -> int:
    return max(-(-tokens // snapshot.block_size), 0)
