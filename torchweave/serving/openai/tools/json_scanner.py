"""One call in JSON, `{"name": ..., "arguments": {...}}`, read character by character, so that arguments are told as they come."""

from __future__ import annotations

import json
from collections.abc import Collection

from torchweave.serving.openai.tools.base import ArgumentsDelta, Call, ParserDelta

_NAMES, _ARGUMENTS = ("name",), ("arguments", "parameters")
_OPENING, _CLOSING, _SPACE = "{[", "}]", " \t\r\n"
_BEHIND_A_VALUE = ",}" + _SPACE


class JsonValueScanner:
    """The text of one JSON value as it comes: an object or an array until it is closed. `done` then."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, char: str) -> bool:
        """Whether `char` belongs to the value."""
        if self.done or (self._depth == 0 and char in _SPACE):
            return False
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
        return True


class JsonCallScanner:
    """Reads one call.

    Args:
        index: which call of the answer it is.
        tool_names: the functions that there are; an object with another name is no call.

    Attributes:
        done: the object was closed.
        failed: it is no call; `raw` is its text.
        raw: all that was read before it `started`.
        started: the call was told of, so that it can no longer turn out to be text.
    """

    def __init__(self, index: int, tool_names: Collection[str]) -> None:
        self.done = self.failed = self.started = False
        self.raw = ""
        self._index = index
        self._tool_names = tool_names
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the value that is being read; None: a key is being read
        self._part: list[str] = []  # text of the key or value
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._has_arguments = False
        self._streams = False  # the value at hand is told as it comes
        self._arguments_done = False  # all of it

    def feed(self, text: str) -> tuple[list[ParserDelta], str]:
        """More text; returns what is new of the call, and the text behind it once it is `done` or `failed`."""
        pieces: list[ParserDelta] = []
        for at, char in enumerate(text):
            if self._arguments_done and char not in _BEHIND_A_VALUE:  # small models forget the object's last brace
                self.done = True
                return self._merged(pieces), text[at:]
            if not self.started:
                self.raw += char
            self._read(char, pieces)
            if self.done or self.failed:
                return self._merged(pieces), text[at + 1 :]
        return self._merged(pieces), ""

    def _merged(self, pieces: list[ParserDelta]) -> list[ParserDelta]:
        """The name, which comes first, and the arguments as one piece."""
        text = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsDelta))
        names: list[ParserDelta] = [piece for piece in pieces if isinstance(piece, Call)]
        return [*names, ArgumentsDelta(self._index, text)] if text else names

    def _read(self, char: str, pieces: list[ParserDelta]) -> None:
        if self._depth == 0:
            self._depth = int(char == "{")
            self.failed = char != "{" and char not in _SPACE
            return
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
            if self._depth == 0:
                self._end_value(pieces)
                self._end(pieces)
                return
        elif self._depth == 1 and char == ":" and self._key is None:
            self._begin_value()
            return
        elif self._depth == 1 and char == ",":
            self._end_value(pieces)
            return
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
            self._early = _as_object(text)
            if self.started:
                self._give_early(pieces)

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
        if self._early:
            self._give_early(pieces)

    def _give_early(self, pieces: list[ParserDelta]) -> None:
        self._has_arguments = True
        pieces.append(ArgumentsDelta(self._index, self._early))
        self._early = ""

    def _end(self, pieces: list[ParserDelta]) -> None:
        self.done, self.failed = self.started, not self.started
        if self.started and not self._has_arguments:
            pieces.append(ArgumentsDelta(self._index, "{}"))


def _as_object(text: str) -> str:
    """Arguments that came as a JSON text within JSON, or as nothing, as the object that they mean."""
    if text.startswith('"'):
        try:
            return str(json.loads(text)) or "{}"
        except ValueError:
            return text
    return "{}" if text in ("", "null") else text
