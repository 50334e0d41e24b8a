"""Requests, sampling parameters, outputs and responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from torchweave.engine.outputs import beam_search_error
from torchweave.images import ImageInput
from torchweave.utils.stop_regex import RegexMatcher
from torchweave.utils.suggest import did_you_mean, suggest_keywords

FinishReason = Literal["stop", "length", "complete", "cancelled", "error"]
"""Why an answer ended: stop token, limit, complete structured output, cancellation, error. Users see `complete` as `stop`."""

MAX_REQUEST_ID = 2**64 - 1
INVALID_LOGITS = (
    "The model's logits are not finite (NaN or infinity); check its weights, or use a dtype with a larger range "
    "(bfloat16, float32)."
)
"""Error of a request for which the model computed no valid distribution."""


@dataclass(frozen=True)
class StructuredOutputs:
    """Constraint on the form of an answer: exactly one of the first six fields, with vLLM's names.

    Attributes:
        json: JSON schema, as a dict or a string.
        regex: regular expression that the whole answer matches.
        choice: allowed answers.
        grammar: Lark grammar with the rule `start`, or EBNF (`root ::= ...`) with the rule `root`.
        json_object: any JSON object.
        structural_tag: parts of the answer that have a form, as xgrammar's structural tag: a dict or its JSON.
        disable_any_whitespace: JSON without optional white space.

    Raises:
        ValueError: not exactly one field is given, or it has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _FIELD_TYPES_OF_CONSTRAINTS if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise ValueError(
                "structured_outputs takes exactly one of json, regex, choice, grammar, json_object and structural_tag, but "
                f"has "
                f"{' and '.join(given) or 'none'}."
            )
        if not isinstance(getattr(self, given[0]), _FIELD_TYPES_OF_CONSTRAINTS.get(given[0], bool)):
            raise ValueError(
                f"structured_outputs.{given[0]} must be {_FIELD_DESCRIPTIONS[given[0]]}, but is {getattr(self, given[0])!r}."
            )
        if self.choice is not None and not (
            self.choice and all(isinstance(text, str) and text for text in self.choice)
        ):
            raise ValueError(
                f"structured_outputs.choice must be {_FIELD_DESCRIPTIONS['choice']}, but is {self.choice!r}."
            )


StructuredOutputs.__init__ = suggest_keywords(StructuredOutputs.__init__)

_FIELD_TYPES_OF_CONSTRAINTS: dict[str, Any] = {
    "json": (str, dict),
    "regex": str,
    "choice": (list, tuple),
    "grammar": str,
    "structural_tag": (str, dict),
}
_FIELD_DESCRIPTIONS = {
    "structural_tag": "a structural tag (a dict or a string)",
    "json": "a JSON schema (a dict or a string)",
    "regex": "a regular expression (a string)",
    "choice": "a list of non-empty strings",
    "grammar": "a grammar in Lark or EBNF (a string)",
    "json_object": "true or false",
}


_INT_FIELDS = (
    "n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "beam_width", "truncate_prompt_tokens",
    "output_kind",
)  # fmt: skip
_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "top_n_sigma",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
_BOOL_FIELDS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")
_OPTIONAL_FIELDS = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens")
_FIELD_TYPES = tuple(
    (name, {*plain, type(None)} if name in _OPTIONAL_FIELDS else {*plain}, types, expected)
    for names, plain, types, expected in (
        (_INT_FIELDS, (int,), (int, np.integer), "a whole number"),
        (_FLOAT_FIELDS, (int, float), (int, float, np.integer, np.floating), "a number"),
        (_BOOL_FIELDS, (bool,), (), "True or False"),
        (
            ("structured_outputs",),
            (StructuredOutputs,),
            (StructuredOutputs,),
            "a StructuredOutputs, a dict of its fields, or None",
        ),
    )
    for name in names
)
"""Name of each field, its common types (fast check), further types, and their description in errors."""
_MAX_FLOAT = 1e30
"""The device stores values and their inverses as float32."""
_MAX_N = 16384
"""Each answer is a request of its own; vLLM's bound."""
_MAX_STOP_STRINGS, _MAX_STOP_CHARACTERS, _MAX_BAD_WORDS = 1024, 16384, 2048
"""Limits of stop strings and bad words, which each token of an answer is compared with."""
_MAX_BAD_CHARACTERS = 1 << 16
"""Of all bad words that are texts, which are tokenized twice: 32 for each of the most words."""
_MAX_STOP_REGEXES, _MAX_REGEX_CHARACTERS = 8, 2048
_MAX_SHOWN = 400  # characters of a value in an error
_N_RANGE = f"from 1 to {_MAX_N}"  # formatted once, not per request
_TEMPERATURE_RANGE = f"0 (greedy) or a positive number up to {_MAX_FLOAT:g}"
_TOP_N_SIGMA_RANGE = f"a number up to {_MAX_FLOAT:g}, or 0 or -1 for all tokens"
_TRUNCATION_RANGE = "at least 1, -1 for as many as fit, or None"
_LOGPROBS_RANGE = "at least 0, -1 for the vocabulary, or None"
_PENALTY_RANGE = f"between {1 / _MAX_FLOAT:g} and {_MAX_FLOAT:g}, 1 for none"


class RequestOutputKind(IntEnum):
    """What the outputs of `AsyncLLM.generate` and `LLMEngine.step` hold: all so far, what is new, or all at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)  # so that its creation calls no `__setattr__`; see `_set_field`
class SamplingParams:
    """Sampling parameters of a request, under vLLM's names.

    Attributes:
        n: output sequences per prompt, sampled independently.
        temperature: divisor of the logits; 0 is greedy decoding.
        top_k: keep the k most likely tokens. 0 or -1: keep all.
        top_p: keep the smallest set of most likely tokens with total probability top_p; applied after top_k.
        min_p: drop tokens less likely than min_p times the most likely token; applied after top_p.
        top_n_sigma: keep the tokens whose logit is at most so many standard deviations of all logits below the largest; applied
            before top_k, whatever the temperature (Top-nσ, arXiv 2411.07641); about 1 is usual. 0 or -1: keep all. llama.cpp's.
        seed: make the output reproducible whatever the batch holds. None: a random seed.
        max_tokens: most tokens to generate. None: up to the engine's `max_model_len`.
        min_tokens: tokens to generate before stop tokens and stop strings take effect.
        stop: strings that end the output; its text ends before the string.
        stop_regex: regular expressions that end the output, which keeps what they match; SGLang's.
        stop_token_ids: tokens that end the output, besides the model's end tokens.
        ignore_eos: continue after the model's end tokens.
        logprobs: number of most likely tokens whose log-probabilities are returned with each sampled token, up to the engine's
            `max_logprobs`; -1: the vocabulary.
        skip_special_tokens: omit special tokens from the text.
        presence_penalty: subtracted from the logit of each token already in the output.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and the output.
        logit_bias: bias added to logits, `{token id: number}`.
        allowed_token_ids: the only tokens that may be sampled. None: all.
        bad_words: texts or sequences of token ids that the output must not contain.
        prompt_logprobs: like `logprobs`, for each prompt token but the first.
        include_stop_str_in_output: end the text after the stop string, or after the stop token's text.
        detokenize: return texts. Off: token ids alone, without stop strings.
        structured_outputs: required format of the output; a dict of its fields will do. None: free text.
        beam_width: number of beams; above 1, return the `n` best sequences of a beam search instead of sampling.
        length_penalty: beam search: exponent of the length that divides a sequence's score.
        early_stopping: beam search: True stops at `beam_width` finished sequences, False when a better one is unlikely,
            "never" when a better one is impossible.
        extra_args: arguments of your own logits processors, by name; vLLM's.
        truncate_prompt_tokens: last tokens of the prompt that are kept; -1: as many as leave room for the answer. None: all.
        output_kind: what the outputs of `AsyncLLM.generate` and `LLMEngine.step` hold, a `RequestOutputKind`.

    Attributes may be changed; a request checks them again.

    Raises:
        ValueError: a value has a wrong type or is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_regex: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str | list[int]] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    extra_args: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: int = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if isinstance(self.structured_outputs, dict):
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**self.structured_outputs))
        _check_types(self)
        _check_lengths(self)
        keep = self.truncate_prompt_tokens or 0
        checks = (
            ("n", 1 <= self.n <= _MAX_N, _N_RANGE),
            ("temperature", 0 <= self.temperature <= _MAX_FLOAT, _TEMPERATURE_RANGE),
            ("top_k", self.top_k >= -1, "a positive number, or 0 or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("top_n_sigma", self.top_n_sigma == -1 or 0 <= self.top_n_sigma <= _MAX_FLOAT, _TOP_N_SIGMA_RANGE),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, _LOGPROBS_RANGE),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1, or None"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("repetition_penalty", 1 / _MAX_FLOAT <= self.repetition_penalty <= _MAX_FLOAT, _PENALTY_RANGE),
            (
                "stop_token_ids",
                _are_tokens(self.stop_token_ids)
                or (isinstance(self.stop_token_ids, (list, tuple)) and not self.stop_token_ids),
                "a list of token ids, or None",
            ),
            ("logit_bias", _is_bias(self.logit_bias), "token ids with numbers between -100 and 100"),
            ("allowed_token_ids", _are_tokens(self.allowed_token_ids), "a list of at least one token id, or None"),
            ("bad_words", _are_words(self.bad_words), "a list of non-empty strings or token id lists"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1, _LOGPROBS_RANGE),
            ("beam_width", self.beam_width >= 1, "at least 1"),
            ("length_penalty", -5 <= self.length_penalty <= 5, "between -5 and 5"),
            (
                "extra_args",
                self.extra_args is None or isinstance(self.extra_args, dict),
                "a dict of arguments, or None",
            ),
            ("truncate_prompt_tokens", self.truncate_prompt_tokens in (None, -1) or keep >= 1, _TRUNCATION_RANGE),
            ("output_kind", 0 <= self.output_kind <= 2, "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY"),
            ("early_stopping", self.early_stopping in (True, False, "never"), 'True, False or "never"'),
        )
        for name, holds, expected in checks:
            if not holds:
                raise ValueError(f"{name} must be {expected}, but is {_shortened(str(getattr(self, name)))}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).")
        if not isinstance(self.stop, str | list | tuple | None) or not all(
            isinstance(each, str) for each in self.stop_strings
        ):
            raise ValueError(
                f"stop must be a string, a list of strings, or None, but is {_shortened(repr(self.stop))}."
            )
        if not all(self.stop_strings):
            raise ValueError("stop holds an empty string; leave it out or give the string that ends the answer.")
        if self.stop_regex is not None:
            _check_stop_regex(self.stop_regex)
        if self.stops_in_text and not self.detokenize:
            raise ValueError("stop strings are looked for in the text; set detokenize=True, or give stop_token_ids.")
        if self.beam_width > 1 and (why := beam_search_error(self)):
            raise ValueError(why)

    @classmethod
    def restored(cls, changed: dict[str, Any]) -> SamplingParams:
        """Parameters that were valid before they were sent, from the fields that differ from the defaults: without a validation."""
        params = object.__new__(cls)
        params.__dict__.update(_DEFAULTS, **changed)
        return params

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Parameters from values of which None stands for the default, as in vLLM."""
        values: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None or name in _OPTIONAL_FIELDS
        }
        return cls(**values)

    def checked(self) -> SamplingParams:
        """These parameters, checked again if an attribute was changed.

        Raises:
            ValueError: see `SamplingParams`.
        """
        if self.__dict__.pop("_is_changed", False):
            self.__post_init__()
        return self

    def clone(self) -> SamplingParams:
        """A copy, under vLLM's name."""
        return deepcopy(self)

    def num_logprobs(self, vocab_size: int) -> int:
        """Most likely tokens reported with each sampled token; -1: no log-probabilities."""
        return _count(self.logprobs, vocab_size)

    def num_prompt_logprobs(self, vocab_size: int) -> int:
        """The same for tokens of the prompt."""
        return _count(self.prompt_logprobs, vocab_size)

    def each(self) -> list[SamplingParams]:
        """Parameters of each of the `n` answers: consecutive seeds, and prompt log-probabilities only for the first."""
        params: list[SamplingParams] = [self]
        for index in range(1, self.n):
            other = copy(self)  # without another validation of long lists
            object.__setattr__(other, "seed", None if self.seed is None else (self.seed + index) % 2**64)
            object.__setattr__(other, "prompt_logprobs", None)
            params.append(other)
        return params

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_regexes(self) -> tuple[str, ...]:
        if self.stop_regex is None:
            return ()
        return (self.stop_regex,) if isinstance(self.stop_regex, str) else tuple(self.stop_regex)

    @property
    def stops_in_text(self) -> bool:
        """Whether each token's text must be looked at."""
        return bool(self.stop_strings) or self.stop_regex is not None


SamplingParams.__init__ = suggest_keywords(SamplingParams.__init__)
_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(SamplingParams)}


def _set_field(params: SamplingParams, name: str, value: Any) -> None:
    """Change an attribute.

    Raises:
        AttributeError: there is no such parameter.
    """
    if name not in _DEFAULTS:
        raise AttributeError(f"SamplingParams has no {name!r}; {did_you_mean(name, _DEFAULTS, 'see its docstring')}")
    params.__dict__.update({name: value, "_is_changed": True})


SamplingParams.__setattr__ = _set_field  # type: ignore[method-assign, assignment]


def _count(logprobs: int | None, vocab_size: int) -> int:
    return -1 if logprobs is None else vocab_size if logprobs == -1 else min(logprobs, vocab_size)


def _check_types(params: SamplingParams) -> None:
    """Reject values of a wrong type, and convert NumPy numbers, whose arithmetic wraps, to Python numbers."""
    for name, plain, types, expected in _FIELD_TYPES:
        value = getattr(params, name)
        if type(value) in plain:
            continue
        if not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{name} must be {expected}, but is {value!r}.")
        if isinstance(value, np.generic):
            object.__setattr__(params, name, value.item())


def _check_lengths(params: SamplingParams) -> None:
    """Reject lists whose check at each token would delay other requests."""
    stop, words = params.stop, params.bad_words
    if isinstance(stop, (list, tuple)) and len(stop) > _MAX_STOP_STRINGS:
        raise ValueError(f"stop holds {len(stop)} strings; give at most {_MAX_STOP_STRINGS}.")
    size = sum(len(each) for each in stop if isinstance(each, str)) if isinstance(stop, (str, list, tuple)) else 0
    if size > _MAX_STOP_CHARACTERS:
        raise ValueError(f"stop holds {size} characters in all; give at most {_MAX_STOP_CHARACTERS}.")
    if isinstance(words, (list, tuple)) and len(words) > _MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words holds {len(words)} words, counting a text twice if it differs after a space; give at most "
            f"{_MAX_BAD_WORDS}."
        )
    size = sum(len(word) for word in words if isinstance(word, str)) if isinstance(words, (list, tuple)) else 0
    if size > _MAX_BAD_CHARACTERS:
        raise ValueError(f"bad_words holds {size} characters in all; give at most {_MAX_BAD_CHARACTERS}.")


def _check_stop_regex(given: object) -> None:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
        raise ValueError(f"stop_regex must be a string, a list of strings, or None, but is {_shortened(repr(given))}.")
    if len(patterns) > _MAX_STOP_REGEXES or sum(map(len, patterns)) > _MAX_REGEX_CHARACTERS:
        raise ValueError(
            f"stop_regex must hold at most {_MAX_STOP_REGEXES} expressions with {_MAX_REGEX_CHARACTERS} characters in all."
        )
    for pattern in patterns:
        RegexMatcher(pattern)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_token(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _are_tokens(ids: object) -> bool:
    if ids is None:
        return True
    if not isinstance(ids, (list, tuple)) or not ids:
        return False
    if set(map(type, ids)) == {int}:  # ten times as fast for a whole vocabulary
        return min(ids) >= 0
    return all(_is_token(each) for each in ids)


def _is_bias(bias: object) -> bool:
    if bias is None:
        return True
    return isinstance(bias, dict) and all(
        _is_token(token) and isinstance(value, (int, float)) and -100 <= value <= 100 for token, value in bias.items()
    )


def _are_words(words: object) -> bool:
    if words is None:
        return True
    if not isinstance(words, (list, tuple)):
        return False
    return all(bool(word) and (isinstance(word, str) or _are_tokens(word)) for word in words)


@dataclass(frozen=True)
class InferenceRequest:
    """A request to the batch manager: token ids in, token ids out.

    Attributes:
        id: 0 to 2**64 - 1, unique among the requests in flight.
        input_ids: prompt tokens, at least one.
        sampling: sampling parameters. The caller handles `n` and `stop`: the batch manager gives one answer, as tokens.
        streaming: a response per token; else one at the end.
        priority: requests with a higher priority start earlier, equal ones in the order of arrival; see `scheduling_policy`.
        cache_salt: requests with different salts share no KV cache blocks.
        images: of the prompt, in their order.
        pooling: the request ends with its prompt and returns `Output.pooled`; an engine runs either such requests or others.
        adapter: name of a loaded low-rank adapter; empty for none.
        client: who sent it; grammars of several clients are compiled in turn.
    """

    id: int
    input_ids: np.ndarray
    sampling: SamplingParams = field(default_factory=SamplingParams)
    streaming: bool = False
    priority: int = 0
    cache_salt: str = ""
    images: tuple[ImageInput, ...] = ()
    pooling: bool = False
    adapter: str = ""
    client: str = ""


POOLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Sampling parameters of every request that pools: it ends where its first token would be sampled."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the sampled token and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class BeamOutput(NamedTuple):
    """One answer of a beam search.

    Attributes:
        token_ids: int32, including a stop token at the end.
        score: sum of the tokens' log-probabilities, divided by their number to the power of `length_penalty`.
    """

    token_ids: np.ndarray
    score: float
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()


class Output(NamedTuple):
    """New tokens of a request since its last response.

    Attributes:
        token_ids: int32, including the stop token at the end.
        finish_reason: None until the final response.
        logprobs: log-probabilities of these tokens, if requested.
        prompt_logprobs: log-probabilities of the prompt tokens except the first, in the first response after the prefill.
        beams: the `n` best answers of a beam search, best first; the other fields are those of the first.
        num_cached_tokens: prompt tokens found in the prefix cache; in the final response.
        pooled: float32, the pooled row of a request that pools, before normalization or activation; in the final response.
    """

    token_ids: np.ndarray
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    beams: tuple[BeamOutput, ...] = ()
    num_cached_tokens: int = 0
    pooled: bytes = b""


class Response(NamedTuple):
    """A response of the batch manager to one request."""

    id: int
    output: Output
    final: bool
    error: str = ""


NO_TOKENS = np.empty(0, np.int32)
_NO_IDS = np.empty(0, np.uint64)


def refusal(request_id: int, error: str) -> Response:
    """The final response to a request that is rejected or aborted."""
    return Response(request_id, Output(NO_TOKENS, "error"), final=True, error=error)


class Responses(Sequence[Response]):
    """Responses of one iteration: those with one more token of a stream, then all others.

    The former are stored as arrays, so that hundreds of streamed tokens cost no Python per token, and become `Response`s on
    iteration. To serialize them without that cost, read `ids`, `tokens` and `others`.

    Attributes:
        ids: uint64 [n], unfinished requests with exactly one new token and no log-probabilities.
        tokens: int32 [n], their tokens.
        others: all other responses.
    """

    def __init__(
        self, others: Iterable[Response] = (), ids: np.ndarray = _NO_IDS, tokens: np.ndarray = NO_TOKENS
    ) -> None:
        self.ids = ids
        self.tokens = tokens
        self.others = list(others)

    def extend(self, responses: Iterable[Response]) -> None:
        self.others.extend(responses)

    def request_ids(self) -> list[int]:
        return [*self.ids.tolist(), *(response.id for response in self.others)]

    @property
    def num_final(self) -> int:
        return sum(response.final for response in self.others)

    def __len__(self) -> int:
        return len(self.ids) + len(self.others)

    def __iter__(self) -> Iterator[Response]:
        for index, request_id in enumerate(self.ids.tolist()):
            yield Response(request_id, Output(self.tokens[index : index + 1]), False)
        yield from self.others

    @overload
    def __getitem__(self, index: int) -> Response: ...
    @overload
    def __getitem__(self, index: slice) -> list[Response]: ...
    def __getitem__(self, index: int | slice) -> Response | list[Response]:
        return list(self)[index]
