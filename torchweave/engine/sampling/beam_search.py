"""Beam search of one request: the active beams and the best hypotheses. No slots, no blocks, no device.

Source: transformers' `GenerationMixin._beam_search` (4.50 and later), whose tokens it reproduces: the candidates of a step are the
best `max(2, 1 + number of stop tokens) * width` continuations; those among the best `width` that end become hypotheses; the best
others continue. Scores are sums of float32 log-probabilities, added in float32 as in the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchweave.engine.request import BeamOutput, FinishReason, SamplingParams, TokenLogprobs


class Beam(NamedTuple):
    """An unfinished sequence.

    Attributes:
        tokens: int32, generated so far.
        score: sum of their log-probabilities.
        logprobs: one entry per token, if requested.
    """

    tokens: np.ndarray
    score: np.float32
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Continuations:
    """Most likely next tokens of a beam, best first: log-probabilities float32 [K], ids int64 [K]."""

    values: np.ndarray
    ids: np.ndarray


def num_candidates(params: SamplingParams, num_stops: int) -> int:
    """Continuations of each beam that a step may need: the candidates, and stop tokens that `min_tokens` bans."""
    return max(2, 1 + num_stops) * params.beam_width + (num_stops if params.min_tokens else 0)


class BeamSearch:
    """The search for one request.

    Args:
        params: sampling parameters of the request.
        stops: tokens that end a beam.
        max_tokens: most generated tokens.

    Attributes:
        beams: active beams; a single empty one before the first step.
        finished: the search has ended.
    """

    def __init__(self, params: SamplingParams, stops: frozenset[int], max_tokens: int) -> None:
        self.beams = [Beam(np.empty(0, np.int32), np.float32(0))]
        self.finished = False
        self._params = params
        self._stops = np.array(sorted(stops), np.int64)
        self._max_tokens = max_tokens
        self._hypotheses: list[BeamOutput] = []
        self._may_improve = True

    @property
    def num_generated(self) -> int:
        return len(self.beams[0].tokens)

    def advance(self, continuations: list[Continuations]) -> list[int]:
        """Advance by a token, given each beam's continuations; returns the index of the parent of each new beam."""
        width, length = self._params.beam_width, self.num_generated + 1
        scores, parents, tokens = self._candidates(continuations)
        ends = np.isin(tokens, self._stops) | (length >= self._max_tokens)
        self._add_hypotheses(continuations, scores, parents, tokens, ends, length)
        active = np.flatnonzero(~ends)[:width]
        if not active.size:
            self.finished = True
            return []
        self.beams = [
            self._extend(continuations, np.float32(scores[at]), int(parents[at]), int(tokens[at])) for at in active
        ]
        self._may_improve = self._may_improve and self._can_improve(length)
        full = len(self._hypotheses) == width and self._params.early_stopping is True
        self.finished = full or not self._may_improve
        return parents[active].tolist()

    def _candidates(self, continuations: list[Continuations]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores, parents and tokens of the best continuations of all beams, best first."""
        scores = np.concatenate(
            [each.values + beam.score for each, beam in zip(continuations, self.beams, strict=True)]
        )
        parents = np.repeat(np.arange(len(continuations)), [len(each.ids) for each in continuations])
        tokens = np.concatenate([each.ids for each in continuations])
        if self.num_generated < self._params.min_tokens:
            scores = np.where(np.isin(tokens, self._stops), np.float32(-np.inf), scores)
        top = np.argsort(-scores, kind="stable")[: max(2, 1 + len(self._stops)) * self._params.beam_width]
        return scores[top], parents[top], tokens[top]

    def _add_hypotheses(
        self,
        continuations: list[Continuations],
        scores: np.ndarray,
        parents: np.ndarray,
        tokens: np.ndarray,
        ends: np.ndarray,
        length: int,
    ) -> None:
        """Add the candidates that ended to the hypotheses, and keep the best."""
        width = self._params.beam_width
        for index in np.flatnonzero(ends[:width]):
            beam = self._extend(continuations, np.float32(scores[index]), int(parents[index]), int(tokens[index]))
            reason = "stop" if tokens[index] in self._stops else "length"
            self._hypotheses.append(
                BeamOutput(beam.tokens, self._length_normalized(beam.score, length), reason, beam.logprobs)
            )
        self._hypotheses.sort(key=lambda answer: -answer.score)  # stable: older before equal ones
        del self._hypotheses[width:]

    def _extend(self, continuations: list[Continuations], score: np.float32, parent: int, token: int) -> Beam:
        beam, count = self.beams[parent], self._params.logprobs
        extended = Beam(np.append(beam.tokens, np.int32(token)), score)
        if count is None:
            return extended
        continuation = continuations[parent]
        chosen = continuation.values[continuation.ids == token][0]
        top = dict(zip(continuation.ids[:count].tolist(), continuation.values[:count].tolist(), strict=True))
        entry = TokenLogprobs(token, float(chosen), int((continuation.values > chosen).sum()) + 1, top)
        return extended._replace(logprobs=(*beam.logprobs, entry))

    def _length_normalized(self, score: np.float32, length: int) -> float:
        return float(score / np.float32(length**self._params.length_penalty))

    def _can_improve(self, length: int) -> bool:
        """Whether the best active beam may still become better than the worst hypothesis."""
        if len(self._hypotheses) < self._params.beam_width:
            return True  # any answer is added
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._length_normalized(self.beams[0].score, length) > self._hypotheses[-1].score

    def best(self, reason: FinishReason | None = None) -> tuple[BeamOutput, ...]:
        """The `n` best answers, best first; with `reason`, those of a cancelled search, including its active beams."""
        answers = list(self._hypotheses)
        if reason is not None and self.num_generated:
            active = ((beam, self._length_normalized(beam.score, self.num_generated)) for beam in self.beams)
            answers += [BeamOutput(beam.tokens, score, reason, beam.logprobs) for beam, score in active]
            answers.sort(key=lambda answer: -answer.score)
        return tuple(answers[: self._params.n])
