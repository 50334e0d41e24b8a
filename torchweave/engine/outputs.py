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


# -- beam search -------------------------------------------------------------------------------------------------------

_SAMPLING_DEFAULTS = {"temperature": (0, 1), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "top_n_sigma": (0, -1)}
_UNSUPPORTED_WITH_BEAMS = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
}


def beam_search_error(params: Any) -> str:
    """Why these `SamplingParams` exclude a beam search, in a sentence; empty if they do not."""
    if params.n > params.beam_width:
        return (
            f"A beam search with beam_width={params.beam_width} has at most {params.beam_width} answers, but n is {params.n}; "
            "raise beam_width or lower n."
        )
    if params.stops_in_text:
        return "A beam search does not support stop strings; give stop_token_ids, or leave stop or beam_width out."
    if params.logprobs == -1:
        return "logprobs=-1 is not supported in a beam search; give a number, or leave logprobs or beam_width out."
    for name, meaningless in _SAMPLING_DEFAULTS.items():
        if getattr(params, name) not in meaningless:
            return f"A beam search does not sample, so {name} has no effect with beam_width; leave one of them out."
    for name, default in _UNSUPPORTED_WITH_BEAMS.items():
        if getattr(params, name) != default:
            return f"{name} is not supported in a beam search; leave it or beam_width out."
    return ""
