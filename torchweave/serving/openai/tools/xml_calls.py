"""Parsers of calls whose arguments are texts between tags, as in XML: Qwen3-Coder, GLM, Seed-OSS, MiniMax-M2, DeepSeek-V3.2."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from torchweave.serving.openai.tools.base import ArgumentsDelta, Call, ParserDelta, split_at
from torchweave.serving.openai.tools.parsers import MarkedCallsParser

_MAX_HEAD = 1024
"""Longest tag with the name of a function or an argument; a longer one is text."""


def argument_value(text: str, schema: Any) -> Any:
    """The value of an argument that is written as text: a text if the schema allows one, else JSON, if it is any."""
    kinds = _kinds(schema)
    if "string" in kinds or not kinds:
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _kinds(schema: Any) -> set[str]:
    """JSON types that a schema allows; empty if it declares none."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        kinds = kinds.union(*map(_kinds, options)) if isinstance(options, list) else kinds
    if isinstance(values := schema.get("enum"), list) and not kinds:
        kinds = {"string" if isinstance(value, str) else "number" for value in values}
    return {str(kind) for kind in kinds}


class XmlCallsParser(MarkedCallsParser):
    """Reads calls tag by tag, in linear time; the arguments are sent one by one.

    A section begins with `_OPEN` and ends with `_CLOSE`. Within it `_FUNCTION` matches the tag with the function's name, `_KEY`
    that with the argument's, `_VALUE_END` ends its value, and `_FUNCTION_END` the call.
    """

    _CLOSE: str
    _FUNCTION: re.Pattern[str]
    _FUNCTION_BEGIN: str
    _FUNCTION_END: str
    _KEY: re.Pattern[str]
    _KEY_BEGIN: str
    _VALUE_END: str

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(known)
        self._state = "text"
        self._value: list[str] = []  # parts of the current value
        self._key = ""
        self._properties: Mapping[str, Any] = {}  # schemas of the current function's arguments
        self._num_arguments = 0

    def _step(self, pieces: list[ParserDelta]) -> bool:
        if self._state == "text":
            self._state, self._num_here = "section" if self._read_text(pieces) else "text", 0
            return self._state == "section"
        reads = {"section": self._read_section, "arguments": self._read_arguments, "value": self._read_value}
        return reads[self._state](pieces)

    def _read_section(self, pieces: list[ParserDelta]) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(self._CLOSE):
            self._buffer, self._state = body[len(self._CLOSE) :], "text"
            return True
        match = self._FUNCTION.match(body)
        if match is None and _may_become(body, self._FUNCTION_BEGIN, self._CLOSE):
            return False
        name = "" if match is None else match[1].strip()
        if match is None or name not in self._tool_names:
            pieces += self._text_buffer.text(self._marker)
            self._state = "text"
            return True
        self._buffer, self._state, self._num_arguments = body[match.end() :], "arguments", 0
        schema = self._tool_names[name] if isinstance(self._tool_names, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._text_buffer.call()
        pieces.append(Call(self._num_calls, name))
        self._num_calls += 1
        self._num_here += 1
        return True

    def _read_arguments(self, pieces: list[ParserDelta]) -> bool:
        self._buffer = self._buffer.lstrip()
        match = self._KEY.match(self._buffer)
        if match is not None:
            self._key, self._state, self._value = self._read_key(match), "value", []
            self._buffer = self._buffer[match.end() :]
            return True
        if _may_become(self._buffer, self._KEY_BEGIN, self._FUNCTION_END, self._CLOSE):
            return False
        if self._buffer.startswith(self._FUNCTION_END):
            self._buffer = self._buffer[len(self._FUNCTION_END) :]
        self._end_call(pieces)
        return True

    def _read_key(self, match: re.Match[str]) -> str:
        """The argument's name, from the match of `_KEY`."""
        return match[1].strip()

    def _read_value(self, pieces: list[ParserDelta]) -> bool:
        before, marker, self._buffer = split_at(self._buffer, self._VALUE_END)
        self._value.append(before)
        if not marker:
            return False
        self._state = "arguments"
        text = json.dumps(self._convert("".join(self._value)), ensure_ascii=False)
        before = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        pieces.append(ArgumentsDelta(self._num_calls - 1, f"{before}{json.dumps(self._key)}: {text}"))
        return True

    def _convert(self, text: str) -> Any:
        return argument_value(text, self._properties.get(self._key))

    def _end_call(self, pieces: list[ParserDelta]) -> None:
        pieces.append(ArgumentsDelta(self._num_calls - 1, "}" if self._num_arguments else "{}"))
        self._state = "section"

    def finish(self) -> list[ParserDelta]:
        pieces: list[ParserDelta] = []
        if self._state == "arguments" and not self._buffer.strip():  # only closing tags are missing
            self._end_call(pieces)
        rest = self._buffer if self._state == "text" else ""
        if self._state == "section" and self._buffer and not self._CLOSE.startswith(self._buffer):
            rest = self._marker + self._buffer
        return pieces + self._end(rest)


def _may_become(text: str, tag: str, *markers: str) -> bool:
    """Whether more text may complete a tag, of which `tag` is the beginning, or one of the markers."""
    if not text or any(begin.startswith(text) and begin != text for begin in (tag, *markers)):
        return True
    return len(text) < _MAX_HEAD and text.startswith(tag)


class Qwen3CoderParser(XmlCallsParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5)."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _FUNCTION, _FUNCTION_BEGIN = re.compile(r"<function=([^>]{1,256})>"), "<function="
    _FUNCTION_END = "</function>"
    _KEY, _KEY_BEGIN = re.compile(r"<parameter=([^>]{1,256})>"), "<parameter="
    _VALUE_END = "</parameter>"

    def _convert(self, text: str) -> Any:
        """A value without the line break behind its opening tag and the one before its closing tag."""
        return super()._convert(text.removeprefix("\n").removesuffix("\n"))


class SeedOssParser(Qwen3CoderParser):
    """The same within `<seed:tool_call>` (Seed-OSS)."""

    _OPEN, _CLOSE = "<seed:tool_call>", "</seed:tool_call>"


class GlmParser(XmlCallsParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM-4.5 and later)."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _FUNCTION, _FUNCTION_BEGIN = re.compile(r"([^\s<]{1,256})(?=\s*<)"), ""
    _FUNCTION_END = ""
    _KEY = re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>")
    _KEY_BEGIN = "<arg_key>"
    _VALUE_END = "</arg_value>"


class InvokeParser(Qwen3CoderParser):
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` within a section (MiniMax-M2)."""

    _OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
    _FUNCTION, _FUNCTION_BEGIN = re.compile(r'<invoke name="?([^">]{1,256})"?\s*>'), "<invoke"
    _FUNCTION_END = "</invoke>"
    _KEY, _KEY_BEGIN = re.compile(r'<parameter name="?([^">]{1,256})"?\s*>'), "<parameter"


class DeepSeekV32Parser(XmlCallsParser):
    """`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true|false">` and closing tags (DeepSeek-V3.2).

    The tag declares whether a value is a text or JSON.
    """

    _OPEN, _CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    _FUNCTION, _FUNCTION_BEGIN = re.compile(r'<｜DSML｜invoke name="([^"]{1,256})"\s*>'), "<｜DSML｜invoke"
    _FUNCTION_END = "</｜DSML｜invoke>"
    _KEY = re.compile(r'<｜DSML｜parameter name="([^"]{1,256})"(?: string="(true|false)")?\s*>')
    _KEY_BEGIN = "<｜DSML｜parameter"
    _VALUE_END = "</｜DSML｜parameter>"
    _is_text: str | None = None

    def _read_key(self, match: re.Match[str]) -> str:
        self._is_text = match[2]
        return match[1]

    def _convert(self, text: str) -> Any:
        if self._is_text is None:
            return super()._convert(text)
        return text if self._is_text == "true" else argument_value(text, {"type": "object"})
