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
    generation, context = snapshot.generation, snapshot.context
    paused = _to_pause(snapshot)
    resting = _to_rest(snapshot, paused)
    going = np.ones(len(generation), bool)
    going[[*resting, *(index for index in paused if index < len(generation))]] = False
    blocks = snapshot.free_blocks - int(generation.lacking[going].sum())

    full = paused or snapshot.leaving_blocks or blocks <= snapshot.num_next_blocks
    decision = admit(snapshot, 0 if full else len(snapshot.waiting))
    chunks = []
    for index, (request, wanted) in enumerate(zip(context, decision.chunks, strict=True), start=len(generation)):
        size = 0 if index in paused else _that_fits(wanted, request.room, blocks, snapshot)
        blocks -= _blocks(size - request.room, snapshot)
        chunks.append(size)
    admitted = []
    for request, wanted in zip(snapshot.waiting, decision.admitted, strict=False):
        spare = snapshot.num_next_blocks + len(admitted)  # the next block of everyone who runs
        size = _that_fits(wanted, 0, blocks - request.revived - spare, snapshot)
        if not size:
            break
        blocks -= request.revived + _blocks(size, snapshot)
        admitted.append(size)
    return Decision(tuple(chunks), tuple(admitted), resting, tuple(sorted(paused)))


def _to_pause(snapshot: Snapshot) -> set[int]:
    """Those that started last, until what is free and comes free is enough for a token of everyone else."""
    generation, context = snapshot.generation, snapshot.context
    needs = np.concatenate([generation.lacking, [int(request.room == 0) for request in context]]).astype(np.int64)
    supply = snapshot.free_blocks + snapshot.leaving_blocks
    short = int(needs.sum()) - supply
    if short <= 0:
        return set()
    held = np.concatenate([generation.held, [request.held for request in context]]).astype(np.int64)
    started = np.concatenate([generation.started, [request.started for request in context]])
    paused: set[int] = set()
    for index in np.argsort(-started, kind="stable")[:-1].tolist():  # never the one that started first
        paused.add(index)
        short -= int(needs[index] + held[index])
        if short <= 0:
            break
    return paused


def _to_rest(snapshot: Snapshot, paused: set[int]) -> tuple[int, ...]:
    """Generation requests whose next block is not free yet: those that started last."""
    lacking = snapshot.generation.lacking
    resting = []
    blocks = snapshot.free_blocks
    for index in np.argsort(snapshot.generation.started, kind="stable").tolist() if lacking.sum() > blocks else ():
        if index in paused:
            continue
        if lacking[index] > blocks:
            resting.append(index)
        else:
            blocks -= int(lacking[index])
    return tuple(sorted(resting))


def _that_fits(wanted: int, room: int, blocks: int, snapshot: Snapshot) -> int:
    """As much of a chunk as fits into `blocks` and the room that is left; all or nothing where chunks are off."""
    size = min(wanted, room + max(blocks, 0) * snapshot.block_size)
    return size if snapshot.chunked_context or size == wanted else 0


def _blocks(tokens: int, snapshot: Snapshot) -> int:
    return max(-(-tokens // snapshot.block_size), 0)
