"""Calls in a family's own format as structural tags, so that a model can be held to calls that its tools accept.

A family names the texts of its format (`Family.tags`); the parser of the same file reads what these tags admit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchweave.engine.sampling.json_schema import rebase_refs
from torchweave.serving.openai.protocol import Tool

Format = dict[str, Any]
_NO_PARAMETERS: Format = {"type": "object", "properties": {}}
_ANY_TEXT: Format = {"type": "any_text"}


def pattern(text: str) -> Format:
    """A text by a regular expression."""
    return {"type": "regex", "pattern": text}


def text(value: str) -> Format:
    """A given text."""
    return {"type": "const_string", "value": value}


def optional(content: Format) -> Format:
    """A format or nothing."""
    return {"type": "optional", "content": content}


def sequence(*elements: Format) -> Format:
    """Formats one after another."""
    return {"type": "sequence", "elements": list(elements)}


SPACE = pattern("[ \\n]{0,8}")
_COMMA = sequence(SPACE, text(","), SPACE)


def _any_of(elements: Sequence[Format]) -> Format:
    return {"type": "or", "elements": list(elements)}


def _json(schema: Format) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@dataclass(frozen=True)
class TaggedCalls:
    """Calls of a request's tools in a model's format.

    Attributes:
        trigger: what each call, or the section of calls, begins with; empty: calls are no part of a text.
        tags: structural tags, of a call or of a section.
        one_only: no more than one tag.
        holds_strict: arguments follow the parameters of strict tools.
    """

    trigger: str
    tags: Sequence[Format]
    one_only: bool
    holds_strict: bool

    @property
    def within_text(self) -> Format | None:
        """Free text with calls; None if the format has none."""
        if not self.trigger:
            return None
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": list(self.tags),
            "stop_after_first": self.one_only,
        }

    @property
    def alone(self) -> Format:
        """At least one call, and nothing but calls."""
        one = _any_of(self.tags)
        return one if self.one_only else {"type": "plus", "content": sequence(one, SPACE)}


@dataclass(frozen=True, kw_only=True)
class CallTags(ABC):
    """How a family writes calls.

    Attributes:
        call: texts around one call. `{name}` in the first is the function's name.
        section: texts around all calls; None: each call stands for itself.
        separator: between the calls of a section.
        in_list: the calls of a section are in brackets.
        template: a text in the chat templates of models that write so; empty: all.
        holds_strict: whether the arguments follow a schema.
    """

    call: tuple[str, str] = ("", "")
    section: tuple[str, str] | None = None
    separator: Format = field(default_factory=lambda: SPACE)
    in_list: bool = False
    template: str = ""
    holds_strict: bool = True

    @abstractmethod
    def content(self, tool: Tool) -> Format:
        """What stands between the texts around a call."""

    def of(self, tools: Sequence[Tool], parallel: bool) -> TaggedCalls:
        """Calls of `tools`, one or several."""
        begin, end = self.call
        calls = [_tag(begin.replace("{name}", tool.function.name), self.content(tool), end) for tool in tools]
        if self.section is None:
            trigger = begin.split("{name}")[0].split("\n")[0]
            return TaggedCalls(trigger, calls, not parallel, self.holds_strict)
        one = _any_of(calls)
        more = [{"type": "star", "content": sequence(self.separator, one)}] if parallel else []
        brackets = [[SPACE, text(mark)] if self.in_list else [] for mark in "[]"]
        content = sequence(*brackets[0], SPACE, one, *more, *brackets[1], SPACE)
        tag = _tag(self.section[0], content, self.section[1])
        return TaggedCalls(self.section[0], [tag], True, self.holds_strict)


@dataclass(frozen=True, kw_only=True)
class ObjectTags(CallTags):
    """A call is a JSON object with the function's name and arguments, in this order.

    Attributes:
        keys: of the name and of the arguments.
        first: properties before them.
    """

    keys: tuple[str, str] = ("name", "arguments")
    first: Format = field(default_factory=dict)

    def content(self, tool: Tool) -> Format:
        """The object."""
        name, arguments = self.keys
        schema = rebase_refs(_parameters(tool), f"#/properties/{arguments}")
        properties = {**self.first, name: {"const": tool.function.name}, arguments: schema}
        return sequence(
            SPACE,
            _json(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            ),
            SPACE,
        )


def object_list(before: str, after: str, **options: Any) -> ObjectTags:
    """A JSON list of calls between two texts."""
    return ObjectTags(section=(before, after), separator=_COMMA, in_list=True, **options)


@dataclass(frozen=True, kw_only=True)
class HeadedTags(CallTags):
    """A call is the function's name within the text before it, and its arguments as a JSON object.

    Attributes:
        head: what stands between the name and the arguments.
        tail: what stands after the arguments.
    """

    head: tuple[Format, ...] = ()
    tail: tuple[Format, ...] = ()

    def content(self, tool: Tool) -> Format:
        """The arguments."""
        return sequence(*self.head, _json(_parameters(tool)), *self.tail)


@dataclass(frozen=True, kw_only=True)
class ParameterTags(CallTags):
    """A call is the function's name within the text before it, and its arguments between tags, in the order of the schema.

    Attributes:
        parameter: texts around a value that is a text. `{key}` in the first is the parameter's name.
        value: the first of them for other values; empty: the same.
    """

    parameter: tuple[str, str]
    value: str = ""

    def content(self, tool: Tool) -> Format:
        """The parameters."""
        schema = tool.function.parameters or _NO_PARAMETERS
        known = schema.get("properties")
        if not tool.function.strict or (not known and schema.get("additionalProperties", True) is not False):
            return {"type": "star", "content": self._any_parameter()}
        required = schema.get("required") or []
        parts = {name: self._parameter(schema, name, part) for name, part in (known or {}).items()}
        return sequence(text(""), *(part if name in required else optional(part) for name, part in parts.items()))

    def _any_parameter(self) -> Format:
        begins = [self.parameter[0], *([self.value] if self.value else [])]
        heads = [begin.split("{key}") for begin in begins]
        return sequence(
            _any_of([sequence(text(head[0]), pattern(r"[\w.-]{1,128}"), text(head[1])) for head in heads]),
            _tag("", _ANY_TEXT, self.parameter[1]),
        )

    def _parameter(self, schema: Format, name: str, part: Any) -> Format:
        part = part if isinstance(part, dict) else {}
        begin, end = self.parameter
        if part.get("type") == "string" and "const" not in part:
            choices = part.get("enum")
            is_choice = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
            if "enum" not in part or is_choice:
                value = _any_of([text(each) for each in choices]) if choices else _ANY_TEXT
                return _tag(begin.replace("{key}", name), value, end)
        pointer = name.replace("~", "~0").replace("/", "~1")
        whole = {"$defs": {"p": rebase_refs(schema, "#/$defs/p")}, "$ref": f"#/$defs/p/properties/{pointer}"}
        return _tag((self.value or begin).replace("{key}", name), _json(whole), end)


_PYTHON_VALUE = r"""
start: value
value: TEXT | NUMBER | CONSTANT | list | map
list: "[" (value (COMMA value)*)? "]"
map: "{" (item (COMMA item)*)? "}"
item: TEXT ": " value
TEXT: /"([^"\\\n]|\\["\\nt])*"/ | /'([^'\\\n]|\\['\\nt])*'/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/
CONSTANT: "True" | "False" | "None" | "true" | "false" | "null"
COMMA: /, ?/
"""


@dataclass(frozen=True, kw_only=True)
class PythonTags(CallTags):
    """A call is `NAME(KEY=VALUE, ...)`, with any keys."""

    call: tuple[str, str] = ("{name}(", ")")
    separator: Format = field(default_factory=lambda: _COMMA)
    holds_strict: bool = False

    def content(self, tool: Tool) -> Format:
        """The arguments."""
        one = sequence(pattern(r"[A-Za-z_]\w{0,127}="), {"type": "grammar", "grammar": _PYTHON_VALUE})
        more = {"type": "star", "content": sequence(pattern(", ?"), one)}
        return optional(sequence(one, more))


def _parameters(tool: Tool) -> Format:
    """The JSON schema of a call's arguments: that of a strict tool, any object otherwise."""
    return (tool.function.parameters or _NO_PARAMETERS) if tool.function.strict else {"type": "object"}
