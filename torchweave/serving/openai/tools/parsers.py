"""Incremental parsers for the tool-call formats of models."""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Collection

from torchweave.serving.openai.tools.base import (
    ArgumentsDelta,
    Call,
    ParserDelta,
    TextDelta,
    WhitespaceBuffer,
    split_at,
)
from torchweave.serving.openai.tools.json_scanner import JsonCallScanner, JsonValueScanner

_AFTER_CALL = " \t\r\n;}"
"""Skipped after a call: separators, and the surplus closing brace that small models write."""


class MarkedCallsParser(ABC):
    """Parser of answers in which a marker opens each call; text before it is part of the answer."""

    _OPEN: str

    def __init__(self, known: Collection[str]) -> None:
        self._tool_names = known
        self._text_buffer = WhitespaceBuffer()
        self._buffer = ""  # ambiguous text
        self._num_calls = 0
        self._num_here = 0  # calls since the marker

    def feed(self, text: str) -> list[ParserDelta]:
        self._buffer += text
        pieces: list[ParserDelta] = []
        while self._buffer and self._step(pieces):
            pass
        return pieces

    @abstractmethod
    def _step(self, pieces: list[ParserDelta]) -> bool:
        """Parse the next part of the buffer; returns whether the rest can be parsed further."""

    def _read_text(self, pieces: list[ParserDelta]) -> bool:
        """Take the text before a marker from the buffer, and the marker; returns whether there is one."""
        before, marker, self._buffer = split_at(self._buffer, self._OPEN)
        pieces += self._text_buffer.text(before)
        return bool(marker)

    @property
    def _marker(self) -> str:
        """The marker as text, if no call followed it."""
        return "" if self._num_here else self._OPEN

    def _end(self, rest: str) -> list[ParserDelta]:
        return self._text_buffer.text(rest) + self._text_buffer.finish(had_calls=self._num_calls > 0)


class HeadedCallsParser(MarkedCallsParser):
    """Parser of answers in which the function's name comes before its arguments, a JSON value."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(known)
        self._value: JsonValueScanner | None = None  # of the current arguments

    def _read_arguments(self, value: JsonValueScanner, pieces: list[ParserDelta]) -> bool:
        end = 0
        while end < len(self._buffer) and not value.done:
            value.take(self._buffer[end])
            end += 1
        pieces.append(ArgumentsDelta(self._num_calls - 1, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        self._value = None if value.done else value
        return bool(self._buffer)


class JsonObjectsParser:
    """An answer of calls only, maybe behind a marker: `{"name": ..., "parameters": {...}}`, separated by `;` or white space
    (Llama 3)."""

    _MARKER = "<|python_tag|>"

    def __init__(self, known: Collection[str]) -> None:
        self._tool_names = known
        self._scanner: JsonCallScanner | None = None
        self._num_calls = 0
        self._head = ""  # text before the first call
        self._is_text = False

    def feed(self, text: str) -> list[ParserDelta]:
        if self._is_text:
            return [TextDelta(text)] if text else []
        if self._scanner is None and self._num_calls == 0:
            return self._begin(text)
        return self._read(text)

    def _begin(self, text: str) -> list[ParserDelta]:
        self._head += text
        body = self._head.lstrip()
        if body.startswith(self._MARKER):
            body = body[len(self._MARKER) :].lstrip()
        elif self._MARKER.startswith(body):
            return []
        if not body:
            return []
        return self._read(body) if body[0] == "{" else self._as_text(self._head)

    def _read(self, text: str) -> list[ParserDelta]:
        pieces: list[ParserDelta] = []
        while text:
            if self._scanner is None:
                text = text.lstrip(_AFTER_CALL)
                if not text:
                    break
                self._scanner = JsonCallScanner(self._num_calls, self._tool_names)
            new, text = self._scanner.feed(text)
            if self._scanner.started:
                pieces += new
            if self._scanner.failed:
                return pieces + self._as_text(self._before() + self._scanner.raw + text)
            if self._scanner.done:
                self._num_calls += 1
                self._scanner = None
        return pieces

    def _before(self) -> str:
        """Text that was skipped before the current call if it is the first."""
        return self._head[: self._head.find("{")] if self._num_calls == 0 else ""

    def _as_text(self, text: str) -> list[ParserDelta]:
        self._is_text, self._scanner = True, None
        return [TextDelta(text)] if text else []

    def finish(self) -> list[ParserDelta]:
        if self._is_text:
            return []
        if self._scanner is not None:
            return [] if self._scanner.started else self._as_text(self._before() + self._scanner.raw)
        return self._as_text(self._head) if self._num_calls == 0 else []


class PythonicParser:
    """An answer of the form `[function(name=value, ...), ...]` (Llama 3.2 and 4). Calls are emitted at its end."""

    def __init__(self, known: Collection[str]) -> None:
        self._tool_names = known
        self._text = ""
        self._is_text = False

    def feed(self, text: str) -> list[ParserDelta]:
        if self._is_text:
            return [TextDelta(text)] if text else []
        self._text += text
        body = self._text.lstrip()
        if not body or body.startswith("["):
            return []
        self._is_text = True
        return [TextDelta(self._text)]

    def finish(self) -> list[ParserDelta]:
        if self._is_text or not self._text:
            return []
        calls = self._calls()
        if calls is None:
            return [TextDelta(self._text)]
        pieces: list[ParserDelta] = []
        for index, (name, arguments) in enumerate(calls):
            pieces += [Call(index, name), ArgumentsDelta(index, json.dumps(arguments, ensure_ascii=False))]
        return pieces

    def _calls(self) -> list[tuple[str, dict[str, object]]] | None:
        """Parse the text as a list of calls; None if it is anything else."""
        try:
            tree = ast.parse(self._text.strip(), mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return None
            calls: list[tuple[str, dict[str, object]]] = []
            for call in tree.elts:
                if not (isinstance(call, ast.Call) and not call.args and ast.unparse(call.func) in self._tool_names):
                    return None
                arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
                json.dumps(arguments)
                calls.append((ast.unparse(call.func), arguments))
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return None
        return calls


class NamedCallParser:
    """The arguments of one call, to which the answer is constrained (`tool_choice` names a function)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[ParserDelta]:
        pieces: list[ParserDelta] = [] if self._started else [Call(0, self._name)]
        self._started = True
        return [*pieces, ArgumentsDelta(0, text)] if text else pieces

    def finish(self) -> list[ParserDelta]:
        return [] if self._started else [Call(0, self._name)]
