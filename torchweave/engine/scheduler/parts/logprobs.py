"""Log-probabilities of sampled tokens, also those from which a beam search continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import InferenceRequest
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.parts.base import StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload, Step, StepLogprobs, StepResult


@dataclass(frozen=True)
class LogprobRows(Payload):
    """Rows with log-probabilities, int64 [n], and the largest number of most likely tokens that one of them reports."""

    leader_only: ClassVar[bool] = True

    rows: np.ndarray
    most: int


class LogprobsPart(StepPart):
    """Its result is a `StepLogprobs` of the rows."""

    name = "logprobs"

    def rejection_reason(self, request: InferenceRequest) -> str:
        return logprobs_rejection(self.host.limits, self.name, request.sampling.logprobs)

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        return state.num_logprobs >= 0

    def payload(self, rows: StepRows) -> LogprobRows | None:
        table = self.host.running.slots
        candidates = (table.needs_host_work[rows.slots] & rows.emits).nonzero()[0]
        counts = np.array([table.state_of(slot).num_logprobs for slot in rows.slots[candidates].tolist()], np.int64)
        chosen = counts >= 0
        return LogprobRows(candidates[chosen], int(counts.max())) if chosen.any() else None

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        logprobs: StepLogprobs | None = result.parts.get(self.name)
        if logprobs is None:
            return rows
        table, entry_of_row = self.host.running.slots, {int(row): i for i, row in enumerate(logprobs.rows)}
        for row in rows[np.isin(rows, logprobs.rows)].tolist():
            state = table.state_of(int(step.slots[row]))
            token = int(result.tokens[row] if result.tokens.ndim == 1 else result.tokens[row, 0])
            entry = logprobs.entry(entry_of_row[row], max(token, -1 - token), state.num_logprobs)
            state.logprobs.append(entry)
        return rows

    def answer(self, state: RequestState, fields: dict[str, Any]) -> None:
        if state.logprobs:
            fields["logprobs"], state.logprobs = tuple(state.logprobs), []


def logprobs_rejection(limits: Limits, name: str, asked: int | None) -> str:
    """Why so many most likely tokens as `name` asks for are refused; empty if they are not."""
    if asked is None or limits.max_logprobs < 0 or 0 <= asked <= limits.max_logprobs:
        return ""
    return (
        f"{name} must be at most {limits.max_logprobs}, the engine's max_logprobs, but is {asked}"
        f"{' (the vocabulary)' * (asked == -1)}; lower it, or start the engine with another max_logprobs."
    )


PART = LogprobsPart
