"""Every running request keeps what it may need to its end; nothing is ever paused.

Source: GUARANTEED_NO_EVICT of TensorRT-LLM's batch manager. Requests are admitted first come, first served, while the blocks
they may need at the most are not promised to others; the first that does not fit stops admission, so that a large
request is not overtaken for ever by small ones.
"""

from __future__ import annotations

from torchweave.engine.scheduler.policies.base import Decision, Snapshot
from torchweave.engine.scheduler.policies.chunking import chunk_sizes
from torchweave.engine.scheduler.policies.mixed_step_size import step_token_budget


def guaranteed_no_evict(snapshot: Snapshot) -> Decision:
    blocks = snapshot.unreserved_blocks
    fitting = 0
    for request in snapshot.waiting:
        if request.max_blocks > blocks:
            break
        blocks -= request.max_blocks
        fitting += 1
    return admit(snapshot, fitting)


def admit(snapshot: Snapshot, num_fitting: int) -> Decision:
    """Read on, and start those of the first `num_fitting` waiting requests for which the step has tokens left."""
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
