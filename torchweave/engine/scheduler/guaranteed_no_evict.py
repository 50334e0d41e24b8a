"""Every running request keeps what it may need to its end; nothing is ever paused.

Source: GUARANTEED_NO_EVICT of TensorRT-LLM's batch manager. Requests are admitted first come, first served, while the blocks
they may need at the most are not promised to others; the first that does not fit stops admission, so that a large
request is not overtaken for ever by small ones.
"""

from __future__ import annotations

from torchweave.engine.scheduler.base import Decision, Snapshot


def guaranteed_no_evict(snapshot: Snapshot) -> Decision:
    budget = snapshot.max_num_tokens - snapshot.num_generation
    chunks: list[int] = []
    for remaining in snapshot.context:
        chunks.append(_chunk(remaining, budget, snapshot.chunked_context))
        budget -= chunks[-1]

    admitted: list[int] = []
    blocks = snapshot.unreserved_blocks
    for request in snapshot.waiting[: snapshot.free_slots]:
        chunk = _chunk(request.prompt_tokens, budget, snapshot.chunked_context)
        if chunk == 0 or request.max_blocks > blocks:
            break
        blocks -= request.max_blocks
        budget -= chunk
        admitted.append(chunk)
    return Decision(tuple(chunks), tuple(admitted))


def _chunk(remaining: int, budget: int, chunked: bool) -> int:
    """First come, first served: as much of the prompt as the budget has room for, or all of it or nothing."""
    if chunked:
        return max(min(remaining, budget), 0)
    return remaining if remaining <= budget else 0
