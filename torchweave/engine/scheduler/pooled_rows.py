"""Requests that pool: the rows of a step are those of their prompts, which end with them."""

from __future__ import annotations

import numpy as np

from torchweave.engine.request import INVALID_LOGITS, NO_TOKENS, Output, Response, refusal
from torchweave.engine.scheduler.request_state import RequestState, SlotTable
from torchweave.engine.scheduler.step import Step
from torchweave.pooling import Pooling


def store_pooled(step: Step, pooled: np.ndarray, table: SlotTable, pooling: Pooling | None) -> None:
    """Keep the row of each prompt's last token, or add the sums of a step to those of the steps before.

    Args:
        pooled: float32 [rows, size], see `StepResult.pooled`.
    """
    assert pooling is not None, "only a model that pools returns rows"
    for slot, row, is_last in zip(step.slots.tolist(), pooled, step.emits.tolist(), strict=True):
        state = table.state_of(slot)
        if table.done[slot]:
            continue
        if pooling.pooling_type == "mean":
            state.pooled = row.copy() if state.pooled is None else state.pooled + row
        elif is_last:
            state.pooled = row.copy()
        if is_last and pooling.pooling_type == "mean":
            assert state.pooled is not None
            state.pooled /= np.float32(len(state.prompt))


def pooled_response(state: RequestState) -> Response:
    """The final response to a request that pools: its row, or why it has none."""
    assert state.pooled is not None
    if state.reason == "length" and not np.isfinite(state.pooled).all():  # of an earlier step than the last
        return refusal(state.request.id, INVALID_LOGITS)
    pooled = state.pooled.tobytes() if state.reason == "length" else b""
    output = Output(NO_TOKENS, state.reason, num_cached_tokens=state.num_cached_tokens, pooled=pooled)
    return Response(state.request.id, output, final=True, error=state.error)
