"""Tool calls: settings of a request, detection of a model's format, and the JSON schema of forced calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweave.serving.openai.protocol import Tool
from torchweave.serving.openai.tools import json_calls, parsers, xml_calls
from torchweave.serving.openai.tools.base import ArgumentsDelta as ArgumentsDelta
from torchweave.serving.openai.tools.base import Call as Call
from torchweave.serving.openai.tools.base import ParserDelta as ParserDelta
from torchweave.serving.openai.tools.base import ReasoningDelta as ReasoningDelta
from torchweave.serving.openai.tools.base import TextDelta as TextDelta
from torchweave.serving.openai.tools.base import ToolCallParser as ToolCallParser
from torchweave.serving.openai.tools.harmony import HarmonyParser as HarmonyParser

PARSERS: dict[str, Callable[[Mapping[str, Any]], ToolCallParser]] = {
    **json_calls.JSON_PARSERS,
    "llama3_json": parsers.JsonObjectsParser,
    "mistral": json_calls.MistralParser,
    "pythonic": parsers.PythonicParser,
    "qwen3_coder": xml_calls.Qwen3CoderParser,
    "glm45": xml_calls.GlmParser,
    "seed_oss": xml_calls.SeedOssParser,
    "minimax_m2": xml_calls.InvokeParser,
    "deepseek_v3": json_calls.DeepSeekV3Parser,
    "deepseek_v32": xml_calls.DeepSeekV32Parser,
    "kimi_k2": json_calls.KimiParser,
    "gpt_oss": HarmonyParser,
}
"""By the name of the option `tool_call_parser`; takes the JSON schemas of the functions' parameters by name."""
SPECIAL_TOKENS = frozenset(
    ("mistral", "deepseek_v3", "deepseek_v32", "kimi_k2", "gpt_oss", "granite", "phi4_tool_call", "internlm")
)
"""Formats whose markers are special tokens, or may be."""
# Text of a chat template, and the format that it implies; the most specific first.
_TEMPLATE_MARKERS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|channel|>", "gpt_oss"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|action_start|>", "internlm"),
    ("functools[", "phi4_mini"),
    ("<|/tool_call|>", "phi4_tool_call"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("func_name1(params_name1", "pythonic"),
)


@dataclass(frozen=True)
class ToolUse:
    """Tool settings of a request.

    Attributes:
        tools: definitions for the template; None: no tools.
        forced: JSON schema that constrains the answer to tool calls.
        parser: creates a tool-call parser for one answer; None: answers are not parsed.
        keep_special: the model's tool calls use special tokens.
        new_id: creates the id of a call.
    """

    tools: list[dict[str, Any]] | None = None
    forced: dict[str, Any] | None = None
    parser: Callable[[], ToolCallParser] | None = None
    keep_special: bool = False
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"


def detect_tool_format(template: str) -> str | None:
    """Detect the tool-call format from a chat template; None if unknown."""
    return next((name for marker, name in _TEMPLATE_MARKERS if marker in template), None)


def make_tool_parser(form: str, tools: Sequence[Tool]) -> ToolCallParser:
    """Create a parser of format `form` for one answer."""
    return PARSERS[form]({tool.function.name: tool.function.parameters or {} for tool in tools})


def make_forced_parser(tools: Sequence[Tool], named: str | None) -> ToolCallParser:
    """Create a parser for an answer constrained to `forced_schema`."""
    return (
        json_calls.ForcedCallsParser([tool.function.name for tool in tools])
        if named is None
        else parsers.NamedCallParser(named)
    )


def forced_schema(tools: Sequence[Tool], named: str | None, parallel: bool) -> dict[str, Any]:
    """Build the JSON schema of forced calls: the arguments of `named`, or a list of at least one call.

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
            raise ValueError(
                f"The parameters of {tool.function.name!r} are nested too deeply; use fewer levels."
            ) from None
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
    """Rewrite a schema's local references for its position `place` in another schema."""
    if isinstance(schema, list):
        return [_rebase_refs(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$id"), str):  # local references resolve within the schema with the id
        return schema
    rebased = {name: _rebase_refs(value, place) for name, value in schema.items()}
    ref = rebased.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        rebased["$ref"] = place + ref[1:]
    return rebased


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
