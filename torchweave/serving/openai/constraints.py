"""Constraints on the answers of a chat: of a schema, of calls, and of the reasoning before both, as one structured output."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchweave.engine.request import SamplingParams, StructuredOutputs
from torchweave.engine.sampling.structured_output import loosen_schema
from torchweave.serving.errors import ApiError
from torchweave.serving.openai.answer_parser import AnswerFormat
from torchweave.serving.openai.protocol import ChatRequest, Tool
from torchweave.serving.openai.reasoning import initial_state
from torchweave.serving.openai.tools.call_tags import SPACE, TaggedCalls, optional, sequence, text
from torchweave.serving.request_warnings import RequestWarnings

LENIENT = {"lenient": True}
"""llguidance's option (`x-guidance`) of schemas of which something was left out."""
_ANY_TEXT = {"type": "any_text"}


@functools.lru_cache(256)
def _loosened(schema: str) -> tuple[str, tuple[str, ...]]:
    loose, left_out = loosen_schema(json.loads(schema))
    return json.dumps(loose), tuple(left_out)


def loose_tools(tools: list[Tool], warnings: RequestWarnings) -> tuple[list[Tool], bool]:
    """Tools whose parameters a grammar can hold, and whether something of them was left out; slow for large schemas.

    Raises:
        ApiError: 400, the parameters of a tool are invalid, or (`strict`) not held whole.
    """
    loose, is_lenient = [], False
    for tool in tools:
        function = tool.function
        what = f"The parameters of the tool {function.name!r}"
        parameters, left_out = _loose(function.parameters or {}, bool(function.strict), what, "tools", warnings)
        is_lenient = is_lenient or left_out
        changed = function.model_copy(update={"parameters": parameters or None})
        loose.append(tool.model_copy(update={"function": changed}))
    return loose, is_lenient


def loose_format(body: ChatRequest, warnings: RequestWarnings) -> ChatRequest:
    """A request whose `response_format` a grammar can hold; slow for large schemas.

    Raises:
        ApiError: 400, the schema is invalid, or (`strict`) not held whole.
    """
    form = body.response_format
    if form is None or form.json_schema is None:
        return body
    given = form.json_schema
    schema, left_out = _loose(
        given.schema_, bool(given.strict), "The schema of response_format", "response_format", warnings
    )
    if not left_out:
        return body
    changed = given.model_copy(update={"schema_": {**schema, "x-guidance": LENIENT}})
    return body.model_copy(update={"response_format": form.model_copy(update={"json_schema": changed})})


def _loose(
    schema: dict[str, Any], strict: bool, what: str, param: str, warnings: RequestWarnings
) -> tuple[dict[str, Any], bool]:
    try:
        loose, left_out = _loosened(json.dumps(schema))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:300]
        raise ApiError(400, f"{what} cannot be used: {why.rstrip('.')}.", param=param) from None
    if not left_out:
        return schema, False
    parts = "; ".join(each.rstrip(".") for each in left_out)[:300]
    if strict:
        sentence = f"{what} cannot be held whole by a grammar, as strict asks for: {parts}. Leave strict out, or these."
        raise ApiError(400, sentence, param=param)
    warnings.add("schema", f"{what} cannot be held whole by a grammar; what is left to the model: {parts}.")
    return json.loads(loose), True


@dataclass(frozen=True)
class Constrained:
    """Parameters with a constraint, and how the answer is parsed."""

    params: SamplingParams
    answer_format: AnswerFormat


def constrain(
    params: SamplingParams,
    answer_format: AnswerFormat,
    budget: int | None,
    names: list[str],
    calls: TaggedCalls | None,
    is_strict: bool,
    markers: frozenset[str],
) -> Constrained:
    """Let the constraint of an answer begin after its reasoning, let calls stand beside a schema, and limit the reasoning.

    Args:
        answer_format: with the end of the prompt.
        budget: most tokens of the reasoning; None: any number.
        names: of the functions that the model may call; empty where a call is forced.
        calls: calls in the model's format; None: they are not described.
        is_strict: a tool is strict, so that also free text holds no other calls.
        markers: texts of the reasoning's format that are single tokens. Reasoning whose end is not has no room before a constraint:
            small models never write it, and write the text of a beginning by chance.
    """
    structured, form = params.structured_outputs, answer_format.reasoning
    state = "answer" if form is None else initial_state(form, answer_format.prompt_tail, answer_format.continued)[0]
    strict = calls if is_strict else None
    has_calls = structured is not None and bool(names) and answer_format.tools.parser is not None
    if form is not None and form.in_channels and answer_format.tools.forced is None and not answer_format.continued:
        if structured is None and strict is None and budget is None:
            return Constrained(params, answer_format)
        rest = None if structured is None else _as_format(structured)
        return _combined(params, answer_format, [*_channels(rest, names, calls, budget)])
    reasons = form is not None and form.closing[0] in markers and state != "answer"
    if form is not None and state == "start":
        reasons = reasons and (form.is_implicit or form.opening[0] in markers)
    within_text = strict.within_text if strict is not None and structured is None else None
    if structured is None and budget is None and within_text is None:
        reasons = False
    if structured is None and not reasons and within_text is None:
        return Constrained(params, answer_format)
    if not reasons:
        answer_format = answer_format if structured is None else replace(answer_format, reasoning=None)
        if not has_calls and structured is not None:
            return Constrained(params, answer_format)
    if structured is None:
        elements = [within_text or _ANY_TEXT]
    elif has_calls:
        alone = _begun_calls(answer_format) if calls is None else [calls.alone]
        elements = [SPACE, {"type": "or", "elements": [*alone, _as_format(structured)]}]
    else:
        elements = [SPACE, _as_format(structured)]
    if reasons and form is not None:
        elements.insert(0, _reasoning(form, state, budget))
    return _combined(params, answer_format, elements)


def _combined(params: SamplingParams, answer_format: AnswerFormat, elements: list[dict[str, Any]]) -> Constrained:
    """The constraint of formats one after another."""
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    compact = params.structured_outputs is not None and params.structured_outputs.disable_any_whitespace
    structured = StructuredOutputs(structural_tag=tag, disable_any_whitespace=compact)
    return Constrained(replace(params, structured_outputs=structured), answer_format)


def _reasoning(form: Any, state: str, budget: int | None) -> dict[str, Any]:
    limit = {} if budget is None else {"max_tokens": budget}
    opened = state == "reasoning" or form.is_implicit
    return {
        "type": "reasoning",
        "opened": opened,
        "opening": list(form.opening),
        "closing": list(form.closing),
        **limit,
    }


def _channels(
    answer: dict[str, Any] | None, names: list[str], calls: TaggedCalls | None, budget: int | None
) -> Iterator[dict[str, Any]]:
    """gpt-oss: reasoning, then a call in a channel of its own, or the answer in the final one; without an answer any text.

    Args:
        budget: most tokens of the reasoning, which is one message then.
    """
    limit = {} if budget is None else {"max_tokens": budget}
    end = {"type": "reasoning", "opened": True, "closing": ["<|end|><|start|>assistant"]}
    thought = sequence(text("<|channel|>analysis<|message|>"), end | limit)
    if budget is None:
        yield {"type": "star", "content": thought}
    elif budget > 0:
        yield optional(thought)
    if answer is None:
        yield {"type": "star", "content": sequence(text("<|channel|>commentary<|message|>"), end)}
    made = [sequence(text(f"<|channel|>commentary to=functions.{name}"), _ANY_TEXT) for name in names]
    final = sequence(text("<|channel|>final<|message|>"), answer or _ANY_TEXT)
    yield {"type": "or", "elements": [final, *(made if calls is None else calls.tags)]}


def _begun_calls(answer_format: AnswerFormat) -> list[dict[str, Any]]:
    """The beginning of calls in a format that is not described, and any text."""
    parser = answer_format.tools.parser
    markers = parser.marked.opening if parser is not None and parser.marked is not None else ()
    return [sequence(text(marker), _ANY_TEXT) for marker in markers]


def _as_format(structured: StructuredOutputs) -> dict[str, Any]:
    """A structured output as a format of structural tags."""
    if structured.structural_tag is not None:
        tag = structured.structural_tag
        tag = json.loads(tag) if isinstance(tag, str) else tag
        return tag if tag.get("type") != "structural_tag" or "format" not in tag else tag["format"]
    if structured.regex is not None:
        return {"type": "regex", "pattern": structured.regex}
    if structured.choice is not None:
        return {"type": "or", "elements": [text(choice) for choice in structured.choice]}
    if structured.grammar is not None:
        return {"type": "grammar", "grammar": structured.grammar}
    schema = {"type": "object"} if structured.json is None else structured.json
    return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
