"""Incremental scanner of a JSON call, `{"name": ..., "arguments": {...}}`, which streams the arguments."""

from __future__ import annotations

import json
from collections.abc import Collection

from torchweave.serving.openai.tools.base import ArgumentsDelta, Call, ParserDelta

_NAMES, _ARGUMENTS = ("name",), ("arguments", "parameters")
_OPENING, _CLOSING, _SPACE = "{[", "}]", " \t\r\n"
_AFTER_VALUE = ",}" + _SPACE


class JsonValueScanner:
    """Finds the end of a JSON object or array; `done` once it is closed."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, char: str) -> None:
        """Add a character."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
            self.done = self._depth <= 0


class JsonCallScanner(JsonValueScanner):
    """Scans one call.

    Args:
        index: of the call in the answer.
        tool_names: known functions; an object with another name is text.

    Attributes:
        done: the object is closed.
        failed: the object is not a call; `raw` is its text.
        raw: text before the call `started`.
        started: the `Call` was emitted, so the object can no longer become text.
    """

    def __init__(self, index: int, tool_names: Collection[str]) -> None:
        super().__init__()
        self.failed = self.started = False
        self.raw = ""
        self._index = index
        self._tool_names = tool_names
        self._key: str | None = None  # of the current value; None inside a key
        self._part: list[str] = []  # text of the key or value
        self._early_arguments = ""  # arguments before the name
        self._has_arguments = False
        self._streams = False  # the current value is streamed
        self._arguments_done = False  # completely

    def feed(self, text: str) -> tuple[list[ParserDelta], str]:
        """Add text; returns the new parts of the call, and the text after it once it is `done` or `failed`."""
        pieces: list[ParserDelta] = []
        for at, char in enumerate(text):
            if self._arguments_done and char not in _AFTER_VALUE:  # small models omit the object's last brace
                self.done = True
                return self._merged(pieces), text[at:]
            if not self.started:
                self.raw += char
            self._read(char, pieces)
            if self.done or self.failed:
                return self._merged(pieces), text[at + 1 :]
        return self._merged(pieces), ""

    def _merged(self, pieces: list[ParserDelta]) -> list[ParserDelta]:
        """Merge all arguments into one delta after the name."""
        text = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsDelta))
        names: list[ParserDelta] = [piece for piece in pieces if isinstance(piece, Call)]
        return [*names, ArgumentsDelta(self._index, text)] if text else names

    def _read(self, char: str, pieces: list[ParserDelta]) -> None:
        if self._depth == 0:
            self._depth = int(char == "{")
            self.failed = char != "{" and char not in _SPACE
            return
        between_values = self._depth == 1 and not self._in_string
        self.take(char)
        if self.done:
            self._end_value(pieces)
            self._end(pieces)
        elif between_values and char == ":" and self._key is None:
            self._begin_value()
        elif between_values and char == ",":
            self._end_value(pieces)
        else:
            self._collect(char, pieces)

    def _begin_value(self) -> None:
        try:
            self._key = str(json.loads("".join(self._part)))
        except ValueError:
            self.failed = not self.started
            self._key = ""
        self._part = []
        self._streams = False

    def _collect(self, char: str, pieces: list[ParserDelta]) -> None:
        if not self._part and char in _SPACE and not self._in_string:
            return
        if not self._part and self._key in _ARGUMENTS and self.started and char == "{":
            self._streams = self._has_arguments = True
        self._part.append(char)
        if self._streams and not (char in _SPACE and self._depth == 1 and not self._in_string):
            pieces.append(ArgumentsDelta(self._index, char))
            self._arguments_done = char in _CLOSING and self._depth == 1 and not self._in_string

    def _end_value(self, pieces: list[ParserDelta]) -> None:
        text, key = "".join(self._part).rstrip(), self._key
        self._part, self._key, self._arguments_done = [], None, False
        if key in _NAMES:
            self._begin(text, pieces)
        elif key in _ARGUMENTS and not self._streams:
            self._early_arguments = _as_object(text)
            if self.started:
                self._emit_early_arguments(pieces)

    def _begin(self, text: str, pieces: list[ParserDelta]) -> None:
        try:
            name = json.loads(text)
        except ValueError:
            name = None
        if self.started:
            return
        if not isinstance(name, str) or name not in self._tool_names:
            self.failed = True
            return
        self.started = True
        pieces.append(Call(self._index, name))
        if self._early_arguments:
            self._emit_early_arguments(pieces)

    def _emit_early_arguments(self, pieces: list[ParserDelta]) -> None:
        self._has_arguments = True
        pieces.append(ArgumentsDelta(self._index, self._early_arguments))
        self._early_arguments = ""

    def _end(self, pieces: list[ParserDelta]) -> None:
        self.done, self.failed = self.started, not self.started
        if self.started and not self._has_arguments:
            pieces.append(ArgumentsDelta(self._index, "{}"))


def _as_object(text: str) -> str:
    """Convert arguments that are a JSON string, empty or null to an object."""
    if text.startswith('"'):
        try:
            return str(json.loads(text)) or "{}"
        except ValueError:
            return text
    return "{}" if text in ("", "null") else text
