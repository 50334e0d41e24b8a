"""Tool calls: settings of a request, detection of a model's format, and the JSON schema of forced calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchweave.engine.sampling.json_schema import rebase_refs
from torchweave.plug_points import TOOL_PARSERS
from torchweave.serving.openai.protocol import Tool
from torchweave.serving.openai.tools.base import ArgumentsDelta as ArgumentsDelta
from torchweave.serving.openai.tools.base import Call as Call
from torchweave.serving.openai.tools.base import ParserDelta as ParserDelta
from torchweave.serving.openai.tools.base import ReasoningDelta as ReasoningDelta
from torchweave.serving.openai.tools.base import TextDelta as TextDelta
from torchweave.serving.openai.tools.call_ids import call_ids
from torchweave.serving.openai.tools.call_tags import TaggedCalls as TaggedCalls
from torchweave.serving.openai.tools.families import FAMILIES
from torchweave.serving.openai.tools.forced import ForcedGrammar
from torchweave.serving.openai.tools.grammar import CallParser as CallParser
from torchweave.serving.openai.tools.source import StreamParser as StreamParser


@dataclass(frozen=True)
class ToolUse:
    """Tool settings of a request.

    Attributes:
        tools: definitions for the template; None: no tools.
        forced: JSON schema that constrains the answer to tool calls.
        parser: parser of the calls in answers; None: answers are not parsed.
        keep_special: the model's tool calls use special tokens.
        new_id: creates the id of a call from its name and its index in the answer.
    """

    tools: list[dict[str, Any]] | None = None
    forced: dict[str, Any] | None = None
    parser: CallParser | None = None
    keep_special: bool = False
    new_id: Callable[[str, int], str] = field(default_factory=call_ids)


def detect_tool_format(template: str) -> str | None:
    """Detect the tool-call format from a chat template; None if unknown."""
    return next((name for name, family in FAMILIES.items() if any(text in template for text in family.template)), None)


def has_special_tokens(form: str) -> bool:
    """Whether the markers of a format are special tokens, or may be."""
    return TOOL_PARSERS.get(form).special_tokens


def make_tool_parser(form: str, tools: Sequence[Tool]) -> CallParser:
    """Create the parser of format `form` for the answers of a request."""
    return CallParser(TOOL_PARSERS.get(form).grammar, _schemas(tools))


def calls_in_format(form: str | None, template: str, tools: Sequence[Tool], parallel: bool) -> TaggedCalls | None:
    """Calls of `tools` as structural tags.

    Args:
        form: the model's format; None: unknown.
        template: source of the chat template, which tells variants of a format.
        parallel: several calls are allowed.

    Returns:
        None if the format does not describe its calls so, see `Family.tags`.
    """
    variants = () if form is None or not tools else getattr(TOOL_PARSERS.get(form), "tags", ())
    tags = next((each for each in variants if each.template in template), None)
    return None if tags is None else tags.of(tools, parallel)


def make_forced_parser(tools: Sequence[Tool], named: str | None) -> CallParser:
    """Create the parser of answers constrained to `forced_schema`."""
    return CallParser(ForcedGrammar(named), _schemas(tools))


def new_call_id(form: str | None, num_earlier: int) -> Callable[[str, int], str]:
    """Return what creates ids of calls for the templates of a format; see `call_ids`."""
    return call_ids("call" if form is None else TOOL_PARSERS.get(form).id_form, num_earlier)


def _schemas(tools: Sequence[Tool]) -> dict[str, Any]:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


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
            definitions[str(number)] = rebase_refs(_parameters(tool), place)
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


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
