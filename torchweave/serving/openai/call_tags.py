"""Calls in a model's own format as structural tags, so that a model that calls freely makes only calls that its tools accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchweave.serving.openai.protocol import Tool

Format = dict[str, Any]
_SPACE = {"type": "regex", "pattern": "[ \\n]{0,4}"}
_NO_PARAMETERS = {"type": "object", "properties": {}}


def call_tags(form: str | None, template: str, tools: Sequence[Tool], parallel: bool) -> Format | None:
    """Free text with calls of `tools` alone; their arguments follow the parameters of those that are strict.

    Args:
        form: the model's format, see `FAMILIES`.
        template: source of the chat template, which tells variants of a format.

    Returns:
        None if calls in this format are not described here.
    """
    build = _BUILDERS.get(form or "")
    trigger, tags = build(template, tools) if build is not None else ("", [])
    if not tags:
        return None
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}


def _parameters(tool: Tool) -> Format:
    """The JSON schema of a call's arguments."""
    function = tool.function
    return (function.parameters or _NO_PARAMETERS) if function.strict else {"type": "object"}


def _json(schema: Format) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _call_object(tool: Tool) -> Format:
    """A call as an object with a name and arguments, in this order."""
    schema = _parameters(tool)
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return _json(
        {
            **definitions,
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
    )


def _hermes(template: str, tools: Sequence[Tool]) -> tuple[str, list[Format]]:
    content = [_sequence(_SPACE, _call_object(tool), _SPACE) for tool in tools]
    return "<tool_call>", [{"begin": "<tool_call>", "content": each, "end": "</tool_call>"} for each in content]


def _mistral(template: str, tools: Sequence[Tool]) -> tuple[str, list[Format]]:
    start = "[TOOL_CALLS]"
    if "[ARGS]" not in template:
        return start, []
    return start, [
        {"begin": f"{start}{tool.function.name}[ARGS]", "content": _json(_parameters(tool)), "end": ""}
        for tool in tools
    ]


def _kimi(template: str, tools: Sequence[Tool]) -> tuple[str, list[Format]]:
    start, number = "<|tool_calls_section_begin|>", {"type": "regex", "pattern": "[0-9]{1,4}"}
    calls = [
        {
            "begin": f"<|tool_call_begin|>functions.{tool.function.name}:",
            "content": _sequence(number, _text("<|tool_call_argument_begin|>"), _json(_parameters(tool))),
            "end": "<|tool_call_end|>",
        }
        for tool in tools
    ]
    content = {"type": "plus", "content": {"type": "or", "elements": [{"type": "tag", **each} for each in calls]}}
    return start, [{"begin": start, "content": content, "end": "<|tool_calls_section_end|>"}]


def _qwen3_coder(template: str, tools: Sequence[Tool]) -> tuple[str, list[Format]]:
    start = "<tool_call>"
    return start, [
        {
            "begin": f"{start}\n<function={tool.function.name}>\n",
            "content": _sequence(_text(""), *_tagged_parameters(tool)),
            "end": "</function>\n</tool_call>",
        }
        for tool in tools
    ]


def _tagged_parameters(tool: Tool) -> list[Format]:
    """Parameters between tags, in the order of the schema."""
    schema = tool.function.parameters or _NO_PARAMETERS
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required, parts = schema.get("required") or [], []
    for name, part in (schema.get("properties") or {}).items():
        part = part if isinstance(part, dict) else {}
        is_text = part.get("type") == "string" and "enum" not in part and "const" not in part
        value = {"type": "any_text"} if is_text else _json({**part, **definitions})
        if part.get("type") == "string" and all(isinstance(each, str) for each in part.get("enum") or (5,)):
            value = {"type": "or", "elements": [_text(each) for each in part["enum"]]}
        tag = {"type": "tag", "begin": f"<parameter={name}>\n", "content": value, "end": "\n</parameter>\n"}
        is_free = not tool.function.strict or name not in required
        parts.append({"type": "optional", "content": tag} if is_free else tag)
    return parts


_BUILDERS: dict[str, Callable[[str, Sequence[Tool]], tuple[str, list[Format]]]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "kimi_k2": _kimi,
    "qwen3_coder": _qwen3_coder,
}
