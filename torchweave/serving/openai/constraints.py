"""Constraints on the answers of a chat: of a schema, of calls, and of the reasoning before both, as one structured output."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import Any

from torchweave.engine.request import SamplingParams, StructuredOutputs
from torchweave.engine.sampling.structured_output import loosen_schema
from torchweave.serving.errors import ApiError
from torchweave.serving.openai.answer_parser import AnswerFormat
from torchweave.serving.openai.protocol import ChatRequest, Tool
from torchweave.serving.openai.reasoning import initial_state
from torchweave.serving.request_warnings import RequestWarnings

LENIENT = {"lenient": True}
"""llguidance's option (`x-guidance`) of schemas of which something was left out."""
_SPACE = {"type": "regex", "pattern": "[ \\n]{0,4}"}
_ANY_TEXT = {"type": "any_text"}
_FINAL = "<|channel|>final<|message|>"
_OTHER_CHANNEL = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "<|channel|>analysis<|message|>"},
        {"type": "reasoning", "opened": True, "closing": ["<|end|><|start|>assistant"]},
    ],
}


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
    tags: dict[str, Any] | None,
    markers: frozenset[str],
) -> Constrained:
    """Let the constraint of an answer begin after its reasoning, let calls stand beside a schema, and limit the reasoning.

    Args:
        answer_format: with the end of the prompt.
        budget: most tokens of the reasoning; None: any number.
        names: of the functions that the model may call; empty where a call is forced.
        markers: texts of the reasoning's format that are single tokens. Reasoning whose end is not has no room before a constraint:
            small models never write it, and write the text of a beginning by chance.
        tags: free text with valid calls, where a tool is strict; see `call_tags`.
    """
    structured, form = params.structured_outputs, answer_format.reasoning
    state = "answer" if form is None else initial_state(form, answer_format.prompt_tail, answer_format.continued)[0]
    reasons = form is not None and form.closing[0] in markers and state != "answer"
    if form is not None and state == "start":
        reasons = reasons and (form.is_implicit or form.opening[0] in markers)
    if form is not None and form.in_channels:
        reasons = structured is not None and bool(names)
    elif structured is None and budget is None and tags is None:
        reasons = False
    has_calls = structured is not None and bool(names) and answer_format.tools.parser is not None
    if structured is None and not reasons and tags is None:
        return Constrained(params, answer_format)
    if not reasons and not has_calls and structured is not None:
        return Constrained(params, replace(answer_format, reasoning=None))
    rest = (tags or _ANY_TEXT) if structured is None else _as_format(structured)
    if form is not None and form.in_channels and reasons:
        elements = [{"type": "star", "content": _OTHER_CHANNEL}, _in_channels(rest, names)]
    else:
        calls = [_some(tags)] if tags is not None else _calls(answer_format, names) if has_calls else []
        elements = [{"type": "or", "elements": [*calls, rest]}] if has_calls else [rest]
        if structured is not None:
            elements.insert(0, _SPACE)
        if reasons and form is not None:
            elements.insert(0, _reasoning(form, state, budget))
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    compact = structured is not None and structured.disable_any_whitespace
    combined = StructuredOutputs(structural_tag=tag, disable_any_whitespace=compact)
    if not reasons and structured is not None:
        answer_format = replace(answer_format, reasoning=None)
    return Constrained(replace(params, structured_outputs=combined), answer_format)


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


def _in_channels(rest: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """gpt-oss: a call in a channel of its own, or the constrained answer in the final one."""
    final = {"type": "sequence", "elements": [{"type": "const_string", "value": _FINAL}, rest]}
    calls = [{"type": "const_string", "value": f"<|channel|>commentary to=functions.{name}"} for name in names]
    return {"type": "or", "elements": [final, *({"type": "sequence", "elements": [each, _ANY_TEXT]} for each in calls)]}


def _calls(answer_format: AnswerFormat, names: list[str]) -> list[dict[str, Any]]:
    """The beginning of calls in the model's format, and any text: the model completes its calls as it does without a schema."""
    parser = answer_format.tools.parser
    markers = parser.marked.opening if parser is not None and parser.marked is not None else ()
    starts: list[dict[str, Any]] = [{"type": "const_string", "value": marker} for marker in markers]
    calls = [{"type": "sequence", "elements": [start, _ANY_TEXT]} for start in starts]
    if not markers or any(marker.startswith("<|python_") for marker in markers):  # calls may begin without a marker
        calls += [
            {"type": "json_schema", "json_schema": _call_object(key, names)} for key in ("parameters", "arguments")
        ]
        texts = ("".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in name) for name in names)
        begin = {"type": "regex", "pattern": rf"\[({'|'.join(texts)})\("}
        calls.append({"type": "sequence", "elements": [begin, _ANY_TEXT]})
    return calls


def _call_object(key: str, names: list[str]) -> dict[str, Any]:
    """A call as a JSON object whose arguments have the name `key`."""
    properties = {"name": {"enum": names}, key: {"type": "object"}}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def _some(tags: dict[str, Any]) -> dict[str, Any]:
    """At least one call, and nothing but calls."""
    one = {"type": "or", "elements": [{"type": "tag", **tag} for tag in tags["tags"]]}
    if tags["stop_after_first"]:
        return one
    return {"type": "plus", "content": {"type": "sequence", "elements": [one, _SPACE]}}


def _as_format(structured: StructuredOutputs) -> dict[str, Any]:
    """A structured output as a format of structural tags."""
    if structured.structural_tag is not None:
        tag = structured.structural_tag
        tag = json.loads(tag) if isinstance(tag, str) else tag
        return tag if tag.get("type") != "structural_tag" or "format" not in tag else tag["format"]
    if structured.regex is not None:
        return {"type": "regex", "pattern": structured.regex}
    if structured.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in structured.choice]}
    if structured.grammar is not None:
        return {"type": "grammar", "grammar": structured.grammar}
    schema = {"type": "object"} if structured.json is None else structured.json
    return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
