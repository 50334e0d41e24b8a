"""What `LLM` returns, with vLLM's names: answers, log-probabilities, times of requests, beams and metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Pooled = TypeVar("Pooled")


class Logprob(float):
    """A log-probability. It is the number itself, with vLLM's attributes.

    Attributes:
        rank: 1 for the most likely token; tied tokens share the better rank.
        decoded_token: the token's text; None without a tokenizer.
    """

    __slots__ = ("decoded_token", "rank")
    rank: int | None
    decoded_token: str | None

    def __new__(cls, logprob: float, rank: int | None = None, decoded_token: str | None = None) -> Logprob:
        entry = super().__new__(cls, logprob)
        entry.rank, entry.decoded_token = rank, decoded_token
        return entry

    @property
    def logprob(self) -> float:
        return float(self)

    def __repr__(self) -> str:
        return f"Logprob(logprob={float(self)!r}, rank={self.rank}, decoded_token={self.decoded_token!r})"


Logprobs = dict[int, Logprob]
"""By token id: first the sampled token (or the prompt's), then the most likely ones."""


@dataclass
class RequestMetrics:
    """Times of a request. `arrival_time` is in seconds since 1970; `_ts` are seconds of a monotonic clock, 0 for never.

    Attributes:
        num_generation_tokens: generated tokens of all answers.
        queued_ts: the request was submitted.
        scheduled_ts: its first step was scheduled.
        first_token_ts, last_token_ts: its first and its last token arrived.
    """

    num_generation_tokens: int = 0
    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the arrival to the first token; 0 without one."""
        return max(self.first_token_ts - self.queued_ts, 0.0)


@dataclass
class CompletionOutput:
    """One answer. In a stream, `text`, `token_ids` and `logprobs` are those since the last output.

    Attributes:
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended the answer.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        prompt_logprobs: one entry per prompt token, None for the first; None if not requested.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        metrics: times of the request's first answer; None with `disable_log_stats`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Attributes:
        beam_width: number of beams, and of the sequences returned.
        max_tokens: most tokens to generate.
        ignore_eos: continue after the model's end tokens.
        temperature: only 0: a beam search does not sample.
        length_penalty: exponent of the length that divides a sequence's score.
        include_stop_str_in_output: keep the end token's text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


@dataclass
class BeamSearchSequence:
    """A sequence of a beam search; `tokens` and `text` include the prompt, `logprobs` only the generated tokens."""

    tokens: list[int]
    logprobs: list[Logprobs]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class Metric:
    """A number that `LLM.get_metrics` returns, under its name in the server's `/metrics`."""

    name: str
    value: Any
    labels: dict[str, str] = field(default_factory=dict)


class Counter(Metric):
    """A number that only grows."""


class Gauge(Metric):
    """A number of this moment."""


# -- models that pool --------------------------------------------------------------------------------------------------


@dataclass
class EmbeddingOutput:
    """`embedding`: the embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """`probs`: one number for each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """`score`: how similar two texts are, or how relevant the second is to the first."""

    score: float


@dataclass
class PoolingOutput:
    """`data`: a float32 tensor of the numbers of a prompt."""

    data: Tensor


@dataclass
class PoolingRequestOutput(Generic[Pooled]):
    """What a prompt pooled to.

    Attributes:
        outputs: an `EmbeddingOutput`, a `ClassificationOutput`, a `ScoringOutput` or a `PoolingOutput`.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
