"""What a user asks for and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_REQUEST_ID = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, under vLLM's names.

    Attributes:
        n: answers to the same prompt, each drawn on its own.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: then keep the smallest set of most likely tokens whose probability reaches top_p.
        min_p: then drop tokens less likely than min_p times the most likely one.
        seed: makes the answer reproducible whatever else is in the batch; None draws one.
        max_tokens: tokens to generate at the most; None generates up to the engine's `max_model_len`.
        min_tokens: stop tokens are not drawn before this many tokens.
        stop: strings that end the answer; the answer's text ends before the string.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
        ignore_eos: go on past the model's own end tokens.
        logprobs: log-probabilities of this many most likely tokens with each token, and of the token itself.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checks = (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a positive number"),
            ("top_k", self.top_k >= -1, "a positive number, or 0 or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "between 0 and 100, or None"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1, or None"),
        )
        for name, holds, expected in checks:
            if not holds:
                raise ValueError(f"{name} must be {expected}, but is {getattr(self, name)}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).")
        if any(not text for text in self.stop_strings):
            raise ValueError("stop holds an empty string; leave it out or give the text that should end the answer.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True)
class InferenceRequest:
    """One request as the batch manager takes it: token ids in, token ids out.

    Attributes:
        id: 0 to 2**64 - 1, unique among the requests in flight.
        input_ids: the prompt's tokens, at least one.
        sampling: `n` and `stop` are the caller's business; the batch manager answers each id once, with tokens.
        streaming: a response with every step, else one at the end.
        priority: a higher one starts earlier; equals start in the order of arrival.
        cache_salt: requests with different salts never use each other's KV cache blocks.
    """

    id: int
    input_ids: np.ndarray
    sampling: SamplingParams = field(default_factory=SamplingParams)
    streaming: bool = False
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that was drawn, and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True)
class Output:
    """Tokens of one request: those new since its last response.

    Attributes:
        token_ids: int32; a stop token that ended the request is its last.
        finish_reason: None until the final response.
    """

    token_ids: np.ndarray
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class CompletionOutput:
    """One answer, with vLLM's names. In a stream, `text` and `token_ids` are what came since the last one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers, with vLLM's names."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
