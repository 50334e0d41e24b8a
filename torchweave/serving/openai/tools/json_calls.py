"""Parsers of calls in JSON behind markers (Hermes, Granite, Phi, InternLM, Jamba) and behind names (DeepSeek-V3, Kimi-K2)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial

from torchweave.serving.openai.tools.base import Call, ParserDelta
from torchweave.serving.openai.tools.json_scanner import JsonCallScanner, JsonValueScanner
from torchweave.serving.openai.tools.parsers import HeadedCallsParser, MarkedCallsParser

_BETWEEN = " \t\r\n,;[]"
_MAX_HEAD = 512
"""Longest text between a marker and the arguments; a longer one is text."""


class MarkedJsonParser(MarkedCallsParser):
    """A marker, then a call `{"name": ..., "arguments": {...}}` or a list of them, then maybe a closing marker.

    Args:
        opening: the marker before calls.
        closing: the marker after them; empty: the format has none.
    """

    def __init__(self, known: Collection[str], opening: str, closing: str = "") -> None:
        super().__init__(known)
        self._OPEN, self._CLOSE = opening, closing
        self._scanner: JsonCallScanner | None = None
        self._in_section = False
        self._skipped = ""  # before the current call

    def _step(self, pieces: list[ParserDelta]) -> bool:
        if self._scanner is not None:
            return self._read_call(self._scanner, pieces)
        if not self._in_section:
            self._in_section, self._num_here = self._read_text(pieces), 0
            return self._in_section
        rest = self._buffer.lstrip(_BETWEEN + "}")  # small models write a surplus closing brace
        if rest.startswith("{"):
            self._skipped = self._buffer[: len(self._buffer) - len(rest)]
            self._buffer, self._scanner = rest, JsonCallScanner(self._num_calls, self._tool_names)
        elif not rest or (self._CLOSE and self._CLOSE.startswith(rest) and rest != self._CLOSE):
            return False
        else:
            if self._CLOSE and rest.startswith(self._CLOSE):
                rest = rest.removeprefix(self._CLOSE)
            elif self._num_here:
                rest = self._buffer.lstrip(_BETWEEN)
            else:
                pieces += self._text_buffer.text(self._OPEN)
                rest = self._buffer
            self._buffer, self._in_section = rest, False
        return True

    def _read_call(self, scanner: JsonCallScanner, pieces: list[ParserDelta]) -> bool:
        new, self._buffer = scanner.feed(self._buffer)
        if scanner.started:
            self._text_buffer.call()
            pieces += new
        if scanner.failed:
            pieces += self._text_buffer.text(self._marker + self._skipped + scanner.raw)
            self._scanner, self._in_section = None, False
        elif scanner.done:
            self._num_calls += 1
            self._num_here += 1
            self._scanner = None
        return bool(self._buffer)

    def finish(self) -> list[ParserDelta]:
        rest = self._buffer
        if self._scanner is not None and not self._scanner.started:
            rest = self._marker + self._skipped + self._scanner.raw
        elif self._in_section:
            rest = self._OPEN + rest if self._num_here == 0 and self._scanner is None else ""
        return self._end(rest)


class ForcedCallsParser(MarkedJsonParser):
    """A JSON list of calls, to which the answer is constrained (`tool_choice: required`)."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(known, "[", "]")

    def finish(self) -> list[ParserDelta]:
        return []  # the rest is the start of a truncated call, not text


JSON_PARSERS: dict[str, Callable[[Collection[str]], MarkedJsonParser]] = {
    "hermes": partial(MarkedJsonParser, opening="<tool_call>", closing="</tool_call>"),  # Hermes, Qwen
    "granite": partial(MarkedJsonParser, opening="<|tool_call|>"),  # Granite 3
    "granite31": partial(MarkedJsonParser, opening="<tool_call>", closing="</tool_call>"),  # Granite 3.1 and later
    "phi4_mini": partial(MarkedJsonParser, opening="functools"),  # Phi-4-mini
    "phi4_tool_call": partial(MarkedJsonParser, opening="<|tool_call|>", closing="<|/tool_call|>"),  # its template
    "internlm": partial(MarkedJsonParser, opening="<|action_start|><|plugin|>", closing="<|action_end|>"),
    "jamba": partial(MarkedJsonParser, opening="<tool_calls>", closing="</tool_calls>"),  # Jamba, Hunyuan
}


class HeadedJsonParser(HeadedCallsParser):
    """A section of calls, each a head with the function's name and then its arguments as JSON."""

    _CLOSE: str
    _NAME: re.Pattern[str]
    """Finds the name in the text between the section's begin, or the last call, and the arguments."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(known)
        self._in_section = False

    def _step(self, pieces: list[ParserDelta]) -> bool:
        if self._value is not None:
            return self._read_arguments(self._value, pieces)
        if not self._in_section:
            self._in_section = self._read_text(pieces)
            return self._in_section
        return self._read_head(pieces)

    def _read_head(self, pieces: list[ParserDelta]) -> bool:
        head, brace, _ = self._buffer.partition("{")
        closed, close, after = head.partition(self._CLOSE)
        if close and self._NAME.search(closed) is None:
            self._buffer, self._in_section = after + self._buffer[len(head) :], False
            return True
        if not brace and len(head) < _MAX_HEAD:
            return False
        match = self._NAME.search(head)
        if match is None or match[1] not in self._tool_names or not brace:
            pieces += self._text_buffer.text(self._OPEN + head)
            self._buffer, self._in_section = self._buffer[len(head) :], False
            return True
        self._text_buffer.call()
        pieces.append(Call(self._num_calls, match[1]))
        self._num_calls += 1
        self._buffer, self._value = self._buffer[len(head) :], JsonValueScanner()
        return True

    def finish(self) -> list[ParserDelta]:
        waits = self._in_section and self._value is None
        is_text = not self._in_section or (waits and self._num_calls == 0)
        return self._end((self._OPEN if waits and is_text else "") + self._buffer if is_text else "")


class DeepSeekV3Parser(HeadedJsonParser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, then JSON in a fence (V3, R1), or `NAME<｜tool▁sep｜>JSON` (V3.1)."""

    _OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _NAME = re.compile(r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?\s*([^\s<]+)")


class KimiParser(HeadedJsonParser):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>` in a section (Kimi-K2)."""

    _OPEN, _CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _NAME = re.compile(r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>")


class MistralParser(HeadedCallsParser):
    """`[TOOL_CALLS]` followed by a JSON list of calls, or one or more of `name{...}`, `name[ARGS]{...}` and
    `name[CALL_ID]id[ARGS]{...}`, each after the marker."""

    _OPEN = "[TOOL_CALLS]"

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(known)
        self._list: MarkedJsonParser | None = None
        self._in_name = False

    def feed(self, text: str) -> list[ParserDelta]:
        return super().feed(text) if self._list is None else self._list.feed(text)

    def _step(self, pieces: list[ParserDelta]) -> bool:
        if self._value is not None:
            return self._read_arguments(self._value, pieces)
        if self._in_name:
            return self._read_name(pieces)
        self._in_name = self._read_text(pieces)
        return self._in_name

    def _read_name(self, pieces: list[ParserDelta]) -> bool:
        if self._buffer.lstrip().startswith("[") and not self._num_calls:
            self._list = MarkedJsonParser(self._tool_names, self._OPEN)
            self._list._text_buffer = self._text_buffer
            pieces += self._list.feed(self._OPEN + self._buffer)
            self._buffer = ""
            return False
        name, brace, _ = self._buffer.partition("{")
        if not brace:
            return False
        tool_name = name.partition("[")[0].strip()
        self._in_name = False
        if tool_name not in self._tool_names:
            pieces += self._text_buffer.text(self._OPEN + name)
            self._buffer = self._buffer[len(name) :]
            return True
        self._text_buffer.call()
        pieces.append(Call(self._num_calls, tool_name))
        self._num_calls += 1
        self._value = JsonValueScanner()
        self._buffer = self._buffer[len(name) :]
        return True

    def finish(self) -> list[ParserDelta]:
        if self._list is not None:
            return self._list.finish()
        return self._end(self._OPEN + self._buffer if self._in_name else self._buffer)
