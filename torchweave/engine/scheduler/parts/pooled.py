"""Requests that pool: the rows of a step are those of their prompts, which end with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import INVALID_LOGITS, NO_TOKENS
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload, Step, StepResult


@dataclass(frozen=True)
class PooledRows(Payload):
    """The step returns its rows."""

    leader_only: ClassVar[bool] = True


class PooledPart(StepPart):
    """Its result is float32 [rows, size]: the row of each chunk's last token, or the sum of its tokens' rows."""

    name = "pooled"

    @classmethod
    def needed(cls, host: Host) -> bool:
        return host.limits.pooling is not None

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        assert host.limits.pooling is not None
        self._is_mean = host.limits.pooling.pooling_type == "mean"

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        state.pooled = None
        return True

    def payload(self, rows: StepRows) -> PooledRows:
        return PooledRows()

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        """Keep the row of each prompt's last token, or add the sums of a step to those of the steps before."""
        table, pooled = self.host.running.slots, result.parts[self.name]
        for slot, row, is_last in zip(step.slots.tolist(), pooled, step.emits.tolist(), strict=True):
            state = table.state_of(slot)
            if table.done[slot]:
                continue
            if self._is_mean:
                state.pooled = row.copy() if state.pooled is None else state.pooled + row
            elif is_last:
                state.pooled = row.copy()
            if is_last and self._is_mean:
                assert state.pooled is not None
                state.pooled /= np.float32(len(state.prompt))
        return rows

    def answer(self, state: RequestState, fields: dict[str, Any]) -> None:
        fields["token_ids"] = NO_TOKENS
        if state.pooled is None or state.reason != "length":
            return
        if np.isfinite(state.pooled).all():
            fields["pooled"] = state.pooled.tobytes()
        else:  # of an earlier step than the last
            state.reason, state.error = "error", INVALID_LOGITS
            fields |= {"finish_reason": "error", "num_cached_tokens": 0}


PART = PooledPart
