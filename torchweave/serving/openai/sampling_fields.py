"""Convert request fields to the engine's sampling parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torchweave.engine.request import SamplingParams, StructuredOutputs
from torchweave.images import images_of
from torchweave.serving.ipc.messages import GENERATION_DEFAULTS, ModelCard
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest, Generation

_CONVERTED = ("structured_outputs", "truncate_prompt_tokens")
_SAME_NAME_FIELDS = tuple(
    item.name for item in fields(SamplingParams) if item.name in Generation.model_fields and item.name not in _CONVERTED
)


def completion_params(body: CompletionRequest, model: ModelCard) -> SamplingParams:
    """Sampling parameters of a completion.

    Raises:
        ValueError: a value is out of range, or fields conflict; the message names them.
    """
    others: dict[str, Any] = {"logprobs": body.logprobs}
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise ValueError(f"best_of ({body.best_of}) must be at least n ({body.n or 1}).")
        if body.stream and body.best_of > (body.n or 1):
            raise ValueError(
                "best_of above n cannot be streamed, because the best answers are known only at the end; set stream=false."
            )
        if body.use_beam_search or (body.beam_width or 1) > 1:  # beam search returns the best answers first
            others["beam_width"] = _width_for(body.best_of, body.beam_width)
        elif body.best_of > (body.n or 1):
            others |= {"n": body.best_of, "logprobs": body.logprobs or 0}
    if is_prompt_only(body):
        others["max_tokens"] = 1  # the minimum of the engine; the token is discarded
    if body.echo and body.logprobs is not None:
        others["prompt_logprobs"] = body.logprobs if body.prompt_logprobs is None else body.prompt_logprobs
    return _params(body, model, **others)


def is_prompt_only(body: CompletionRequest) -> bool:
    """Whether the request only scores the prompt: `echo` with `max_tokens` 0."""
    return bool(body.echo) and body.max_tokens == 0


def truncate(ids: list[int], body: Generation, model: ModelCard, max_tokens: int | None) -> list[int]:
    """The tokens of a prompt that `truncate_prompt_tokens` keeps, by `truncation_side` the first or (left) the last ones; -1: as
    many as leave room for the answer.

    Raises:
        ValueError: no token would be left, or the prompt has images, of which parts would be left.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        keep = model.max_model_len - (1 if max_tokens is None else max_tokens)
    if keep < 1:
        raise ValueError("truncate_prompt_tokens must leave at least 1 token; raise it or lower max_tokens.")
    if images_of(ids):
        if len(ids) > keep:
            raise ValueError(
                f"A prompt with images cannot be truncated, and this one has {len(ids)} tokens; send smaller images or fewer "
                "messages, or leave truncate_prompt_tokens out."
            )
        return ids
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def _width_for(best_of: int, given: int | None) -> int:
    """Beam width for `best_of` answers.

    Raises:
        ValueError: the given width is smaller than `best_of`.
    """
    if given is not None and given < best_of:
        raise ValueError(f"beam_width={given} must be at least best_of={best_of}; raise beam_width.")
    return given or best_of


def chat_params(
    body: ChatRequest, model: ModelCard, forced: dict[str, Any] | None, keep_special: bool
) -> SamplingParams:
    """Sampling parameters of a chat completion.

    Args:
        forced: JSON schema of tool calls that constrains the answer. White space is excluded: a model that does not call tools
            by itself may otherwise write nothing else.
        keep_special: the model's tool calls use special tokens.

    Raises:
        ValueError: see `completion_params`.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs requires logprobs=true.")
    others: dict[str, Any] = {
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    if keep_special:
        others["skip_special_tokens"] = False
    if forced is not None:
        others["structured_outputs"] = StructuredOutputs(json=forced, disable_any_whitespace=True)
    return _params(body, model, **{"max_tokens": None} | others)


def _params(body: Generation, model: ModelCard, **others: Any) -> SamplingParams:
    """Merge `others`, the fields of `body`, the checkpoint's defaults and OpenAI's defaults, in this order of precedence."""
    if body.prompt_logprobs is not None and body.stream:
        raise ValueError(
            "prompt_logprobs cannot be streamed; set stream=false, or use echo with logprobs (completions)."
        )
    if body.use_beam_search:
        width = others.setdefault("beam_width", body.beam_width or body.n or 1)  # in vLLM, `n` is the beam width
        if width == 1:  # greedy
            others["temperature"] = 0.0
    if body.vllm_xargs is not None:
        others["extra_args"] = body.vllm_xargs
    if body.no_stop_trim is not None and body.include_stop_str_in_output is None:
        others["include_stop_str_in_output"] = body.no_stop_trim
    defaults = {name: getattr(model, name) for name in GENERATION_DEFAULTS}
    given = {name: getattr(body, name) for name in _SAME_NAME_FIELDS}
    fields = {name: value for name, value in {**given, **others}.items() if value is not None or name in others}
    beam_search = body.use_beam_search or (fields.get("beam_width") or 1) > 1  # supports neither sampling nor penalties
    if beam_search and body.stream:
        raise ValueError("A beam search has no answer before its end, so it cannot be streamed; set stream=false.")
    merged: dict[str, Any] = (
        {} if beam_search else {name: value for name, value in defaults.items() if value is not None}
    )
    merged |= fields
    if "max_tokens" in others and merged["max_tokens"] is None:
        merged["max_tokens"] = model.max_new_tokens
    is_forced = "structured_outputs" in others  # a tool call; `response_format` is that of answers without calls
    structured_outputs = _structured_outputs(body, with_response_format=not is_forced)
    if structured_outputs is not None:
        if is_forced:
            raise ValueError("A forced tool call cannot be combined with structured_outputs; leave one of them out.")
        merged["structured_outputs"] = structured_outputs
    if merged.get("seed") is not None:  # OpenAI's are signed
        merged["seed"] %= 2**64
    return SamplingParams(**merged)


def _structured_outputs(body: Generation, with_response_format: bool) -> StructuredOutputs | None:
    """Structured-output constraint of the answer, from any of its fields."""
    constraints: dict[str, StructuredOutputs] = {}
    if body.structured_outputs is not None:
        constraints["structured_outputs"] = StructuredOutputs(**body.structured_outputs.model_dump(by_alias=True))
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            constraints[f"guided_{name}"] = StructuredOutputs(**{name: value})
    if body.regex is not None:
        constraints["regex"] = StructuredOutputs(regex=body.regex)
    if body.ebnf is not None:
        constraints["ebnf"] = StructuredOutputs(grammar=body.ebnf)
    response_format = body.response_format if with_response_format else None
    if response_format is not None and response_format.type == "json_object":
        constraints["response_format"] = StructuredOutputs(json_object=True)
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise ValueError('response_format of type json_schema needs json_schema: {"name": ..., "schema": {...}}.')
        constraints["response_format"] = StructuredOutputs(json=response_format.json_schema.schema_)
    elif response_format is not None and response_format.type == "structural_tag":
        constraints["response_format"] = StructuredOutputs(
            structural_tag=response_format.model_dump(exclude_unset=True)
        )
    first = next(iter(constraints.values()), None)
    if any(each != first for each in constraints.values()):  # some clients send one constraint by two names
        raise ValueError(f"{' and '.join(constraints)} conflict: each constrains the answer; send only one of them.")
    return first
