"""Log-probabilities of prompt tokens, from the logits at the position before each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import InferenceRequest
from torchweave.engine.scheduler.parts.base import StepPart, StepRows
from torchweave.engine.scheduler.parts.logprobs import logprobs_rejection
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload, Step, StepLogprobs, StepResult


@dataclass(frozen=True)
class PromptTargets(Payload):
    """Prompt tokens whose log-probabilities are computed in a step. All ranks compute their logits.

    Attributes:
        slots: (slot, number of tokens), in the order of `index`.
        index: int64 [n], index of the step's token with the logits.
        targets: int32 [n], next token of the prompt.
        most: largest number of most likely tokens that a request reports.
    """

    slots: tuple[tuple[int, int], ...]
    index: np.ndarray
    targets: np.ndarray
    most: int


class PromptLogprobsPart(StepPart):
    """Its result is a `StepLogprobs` of the targets."""

    name = "prompt_logprobs"

    def rejection_reason(self, request: InferenceRequest) -> str:
        return logprobs_rejection(self.host.limits, self.name, request.sampling.prompt_logprobs)

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        return state.num_prompt_logprobs >= 0

    def fit(self, chunks: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
        table = self.host.running.slots
        return [(slot, table.state_of(slot).chunk_size(size)) for slot, size in chunks]

    def payload(self, rows: StepRows) -> PromptTargets | None:
        slots: list[tuple[int, int]] = []
        index, targets, most = [], [], 0
        first = len(rows.decode_rows)
        for slot, chunk in rows.chunks:
            state, size = self.host.running.slots.state_of(slot), len(chunk.tokens)
            begin, end = max(chunk.start, state.num_scored), min(chunk.start + size, len(state.prompt) - 1)
            if state.num_prompt_logprobs >= 0 and end > begin:
                slots.append((slot, end - begin))
                index.append(np.arange(begin, end) - chunk.start + first)
                targets.append(state.prompt[begin + 1 : end + 1])
                most = max(most, state.num_prompt_logprobs)
            first += size
        return PromptTargets(tuple(slots), np.concatenate(index), np.concatenate(targets), most) if slots else None

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        targets, logprobs = step.parts.get(self.name), result.parts.get(self.name)
        if isinstance(targets, PromptTargets) and logprobs is not None:
            self._store(targets, logprobs)
        return rows

    def _store(self, targets: PromptTargets, logprobs: StepLogprobs) -> None:
        at = 0
        for slot, count in targets.slots:
            state = self.host.running.slots.state_of(slot)
            places = range(at, at + count)
            entries = (logprobs.entry(i, int(targets.targets[i]), state.num_prompt_logprobs) for i in places)
            state.prompt_logprobs.extend(entries)
            state.num_scored += count
            at += count

    def answer(self, state: RequestState, fields: dict[str, Any]) -> None:
        if state.prompt_logprobs:
            fields["prompt_logprobs"], state.prompt_logprobs = tuple(state.prompt_logprobs), []


PART = PromptLogprobsPart
