"""Which form a model calls tools in, by its chat template; and how an answer is held to a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweave.serving.openai.protocol import Tool
from torchweave.serving.openai.tools.base import ToolCallParser
from torchweave.serving.openai.tools.parsers import PARSERS, ForcedCallsParser, NamedCallParser

# What a template that teaches the form holds, the most certain first.
_TEMPLATE_MARKERS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("func_name1(params_name1", "pythonic"),
)


def detect_tool_format(template: str) -> str | None:
    """The form that a chat template teaches; None when none is known."""
    return next((name for sign, name in _TEMPLATE_MARKERS if sign in template), None)


def make_tool_parser(form: str, tools: Sequence[Tool]) -> ToolCallParser:
    """A parser for one answer of a model that calls tools in this form."""
    return PARSERS[form]([tool.function.name for tool in tools])


def make_forced_parser(tools: Sequence[Tool], named: str | None) -> ToolCallParser:
    """A parser for an answer that was held to `forced_schema`."""
    return ForcedCallsParser([tool.function.name for tool in tools]) if named is None else NamedCallParser(named)


def forced_schema(tools: Sequence[Tool], named: str | None, parallel: bool) -> dict[str, Any]:
    """The JSON schema of an answer that calls: the arguments of `named`, or a list of one call or more.

    Raises:
        ValueError: a tool's parameters are nested too deeply.
    """
    if named is not None:
        return _parameters(next(tool for tool in tools if tool.function.name == named))
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        place = f"#/$defs/{number}"
        try:
            definitions[str(number)] = _rebase_refs(_parameters(tool), place)
        except RecursionError:
            raise ValueError(f"The parameters of {tool.function.name!r} are nested too deeply.") from None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "$defs": definitions,
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _rebase_refs(schema: Any, place: str) -> Any:
    """A schema whose references into itself hold where it stands at `place` of another one."""
    if isinstance(schema, list):
        return [_rebase_refs(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$id"), str):  # references are into the nearest schema with an id
        return schema
    found = {name: _rebase_refs(value, place) for name, value in schema.items()}
    refers = found.get("$ref")
    if isinstance(refers, str) and (refers == "#" or refers.startswith("#/")):
        found["$ref"] = place + refers[1:]
    return found


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
