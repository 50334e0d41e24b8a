"""Grammars of answers with calls: where calls begin, how each is written, and where they end."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import regex

from torchweave.serving.openai.tools.schema_types import Parameters
from torchweave.serving.openai.tools.source import END, Output, Source, Steps
from torchweave.serving.openai.tools.values import JSON_QUOTES, PYTHON_QUOTES, ValueReader

SPACE = " \t\r\n"
NAME = r"(?P<name>[^\s<>{}()\[\]\"'`,;:|｜]{1,256})"
"""Pattern of a function's name."""
_NAME = regex.compile(NAME)
_SEPARATORS = SPACE + ",;"
_COLON = regex.compile(rf"[{SPACE}]*:[{SPACE}]*")


class Parsing:
    """What the parts of a grammar share while one answer is parsed.

    Args:
        tools: JSON schemas of the functions' parameters by name.

    Attributes:
        is_open: the last call was not read to its end.
        known_only: text that looks like a call is one only if its function is among the tools.
        trusts_ends: a call ends where its end is written, whatever follows.
    """

    def __init__(self, source: Source, output: Output, tools: Mapping[str, Any]) -> None:
        self.source, self.output, self.tools = source, output, tools
        self.is_open = self.known_only = self.trusts_ends = False

    def may_call(self, name: object, is_whole: bool) -> bool:
        """Whether a call of this name is one; an unknown function's call must be whole to be no text."""
        if not isinstance(name, str) or name in self.tools:
            return isinstance(name, str)
        return is_whole and not self.known_only and _NAME.fullmatch(name) is not None

    def begin(self, name: str) -> None:
        """Begin a call: what was read of it is no text."""
        self.source.release()
        self.output.call(name)
        self.is_open = True

    def add(self, name: str, arguments: str) -> None:
        """Add a whole call; `arguments` are a JSON object."""
        self.begin(name)
        self.output.arguments(arguments)
        self.is_open = False


class CallGrammar(ABC):
    """How one call is written."""

    @abstractmethod
    def read(self, state: Parsing) -> Steps[bool]:
        """Read a call; returns whether there is one. Without one, what was taken is text."""


class ArgumentsGrammar(ABC):
    """How the arguments of a call are written after the function's name."""

    @abstractmethod
    def read(self, state: Parsing, name: str) -> Steps[bool]:
        """Begin the call, and read its arguments; returns whether this is a call."""


class AnswerGrammar(Protocol):
    """Parses an answer."""

    def parse(self, source: Source, output: Output, tools: Mapping[str, Any]) -> Steps[None]:
        """Parse an answer; `tools` are the JSON schemas of the functions' parameters by name."""
        ...


@dataclass(frozen=True)
class Grammar:
    """An answer with calls.

    Attributes:
        calls: forms of a call, tried in this order.
        opening: markers before calls; text may stand around them.
        closing: markers after them; empty: the format has none.
        ignored: markers that are no part of the text.
        brackets: brackets of a list of calls, which may be skipped; small models write a surplus closing brace, too.
        start: what an answer begins with that has calls without a marker. Only functions of the request are called so.
    """

    calls: tuple[CallGrammar, ...]
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    brackets: str = "[]}"
    start: regex.Pattern[str] | None = None

    def parse(self, source: Source, output: Output, tools: Mapping[str, Any]) -> Steps[None]:
        """Parse an answer."""
        state = Parsing(source, output, tools)
        if self.start is not None and (yield from source.match(self.start)) is not None:
            state.known_only = True
            source.hold()
            yield from source.accept(self.start)
            yield from self._read_section(state)
            state.known_only = False
        while marker := (yield from source.read_until(output.text, *self.opening, *self.ignored)):
            if marker in self.ignored:
                source.take(len(marker))
            else:
                yield from self.read_section(state)

    def read_section(self, state: Parsing) -> Steps[None]:
        """Read a marker, which is next, and the calls after it."""
        marker = yield from state.source.starts_with(*self.opening)
        state.source.hold()
        state.source.take(len(marker))
        yield from self._read_section(state)

    def _read_section(self, state: Parsing) -> Steps[None]:
        """Read calls up to the closing marker, or to text that is no call."""
        source = state.source
        num_calls = 0
        while True:
            yield from self._read_between(source)
            end = yield from source.starts_with(*self.closing, END)
            if end or not (yield from self._read_call(state)):
                break
            num_calls += 1
            source.hold()
        source.take(0 if end == END else len(end))
        rest = source.release()
        if num_calls == 0:
            state.output.text(rest)
        elif not end:
            after = rest.lstrip(_SEPARATORS + "]")
            separators = rest[: len(rest) - len(after)]
            state.output.text("".join(char for char in separators if char.isspace()) + after)

    def _read_call(self, state: Parsing) -> Steps[bool]:
        begin = state.source.num_taken
        for call in self.calls:
            if (yield from call.read(state)):
                return True
            if state.source.num_taken > begin:
                break
        return False

    def _read_between(self, source: Source) -> Steps[None]:
        """Skip what separates calls."""
        while True:
            yield from source.skip(_SEPARATORS)
            if (yield from source.starts_with(*self.opening, *self.closing, END)):
                return
            if (yield from source.peek()) not in self.brackets:
                return
            source.take(1)


# -- calls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonCall(CallGrammar):
    """`{"name": NAME, "arguments": {...}}`, with the keys in any order and among others.

    Attributes:
        names: keys of the function's name.
        arguments: keys of the arguments.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")

    def read(self, state: Parsing) -> Steps[bool]:
        source = state.source
        if (yield from source.peek()) != "{":
            return False
        source.take(1)
        call = _JsonCallState()
        while True:
            yield from source.skip(SPACE + ",")
            mark = yield from source.peek()
            if mark == "}":
                source.take(1)
                break
            if mark not in JSON_QUOTES:  # the last brace is missing
                return call.is_begun or (call.arguments is not None and self._end(state, call))
            key = yield from _json_value(source)
            if (yield from source.accept(_COLON)) is None or key is None:
                return call.is_begun
            if not (yield from self._read_item(state, call, str(json.loads(key)))):
                return call.is_begun
        return call.is_begun or self._end(state, call)

    def _read_item(self, state: Parsing, call: _JsonCallState, key: str) -> Steps[bool]:
        """Read the value of a key; returns whether the object may still be a call."""
        if key in self.arguments and not call.is_begun:
            if call.name is not None and state.may_call(call.name, is_whole=True):
                call.is_begun = yield from JSON_ARGUMENTS.read(state, call.name)
                return call.is_begun
            call.arguments = yield from _json_value(state.source)
            return call.arguments is not None
        value = yield from _json_value(state.source)
        if value is None:
            return False
        if key in self.names and call.name is None:
            call.name = json.loads(value)
            return state.may_call(call.name, is_whole=True)
        call.others[key] = value
        return True

    def _end(self, state: Parsing, call: _JsonCallState) -> bool:
        """Begin and end a call that had its arguments before its name, or none."""
        if call.name is not None and call.arguments is None:
            call.arguments = call.other_arguments(Parameters(state.tools.get(call.name)))
        arguments = as_arguments(call.arguments)
        if call.name is None or arguments is None or not state.may_call(call.name, is_whole=call.arguments is not None):
            return False
        state.add(call.name, arguments)
        return True


@dataclass
class _JsonCallState:
    """What was read of a call.

    Attributes:
        arguments: those that came before the name, JSON.
        others: JSON of the other values by key.
    """

    name: str | None = None
    arguments: str | None = None
    is_begun: bool = False
    others: dict[str, str] = field(default_factory=dict)

    def other_arguments(self, parameters: Parameters) -> str | None:
        """Arguments that small models write beside the name, or under another key; None without any."""
        beside = [f"{json.dumps(key)}: {value}" for key, value in self.others.items() if key in parameters]
        if beside:
            return f"{{{', '.join(beside)}}}"
        return next((value for key, value in self.others.items() if key in _OTHER_KEYS), None)


_OTHER_KEYS = ("args", "input", "params")


@dataclass(frozen=True)
class HeadedCall(CallGrammar):
    """A head with the function's `name`, the arguments, and an end.

    Attributes:
        head: pattern up to the arguments. It must not match a text that it could match otherwise with more text.
        arguments: how the arguments are written.
        ends: patterns of what ends the call, each of which may be missing.
    """

    head: regex.Pattern[str]
    arguments: ArgumentsGrammar
    ends: tuple[regex.Pattern[str], ...] = ()

    def read(self, state: Parsing) -> Steps[bool]:
        head = yield from state.source.accept(self.head)
        if head is None or not (yield from self.arguments.read(state, head["name"])):
            return False
        for end in self.ends:
            yield from state.source.accept(end)
        return True


_PYTHON_NAME = regex.compile(r"\s*(?P<name>[^\W\d][\w.-]{0,255})\s*\(")
_PYTHON_KEY = regex.compile(r"\s*(?P<key>[^\W\d][\w-]{0,255})\s*=(?!=)\s*")
_PYTHON_NEXT = regex.compile(r"\s*,")
_PYTHON_END = regex.compile(r"\s*\)")


@dataclass(frozen=True)
class PythonCall(CallGrammar):
    """`NAME(KEY=VALUE, ...)`, with values of Python or JSON. A call is emitted at its end.

    Attributes:
        suffix: what the name ends with besides.
    """

    suffix: str = ""

    def read(self, state: Parsing) -> Steps[bool]:
        source = state.source
        head = yield from source.accept(_PYTHON_NAME)
        if head is None:
            return False
        parts: list[str] = []
        while (yield from source.accept(_PYTHON_END)) is None:
            key = yield from source.accept(_PYTHON_KEY)
            if key is None:
                return False
            reader = ValueReader(parts.append, PYTHON_QUOTES)
            parts.append(f"{', ' if parts else ''}{json.dumps(key['key'])}: ")
            if not (yield from source.read_value(reader)) or reader.guessed:
                return False
            if (yield from source.accept(_PYTHON_NEXT)) is None and (yield from source.match(_PYTHON_END)) is None:
                return False
        name = head["name"].removesuffix(self.suffix)
        if not state.may_call(name, is_whole=True):
            return False
        state.add(name, "{" + "".join(parts) + "}")
        return True


# -- arguments ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonArguments(ArgumentsGrammar):
    """A JSON object; a text that holds one; or nothing.

    Attributes:
        quotes, bare_keys: see `ValueReader`.
        follow: how what follows a call begins, and so no arguments.
    """

    follow: tuple[str, ...] = ("<", "```")
    quotes: tuple[str, ...] = JSON_QUOTES
    bare_keys: bool = False

    def read(self, state: Parsing, name: str) -> Steps[bool]:
        source = state.source
        yield from source.skip(SPACE)
        mark = yield from source.peek()
        if mark == "{":
            if not state.may_call(name, is_whole=True):
                return False
            state.begin(name)
            reader = ValueReader(state.output.arguments, self.quotes, self.bare_keys)
            state.is_open = not (yield from source.read_value(reader))
            return True
        is_none = bool((yield from source.starts_with(*self.follow, END)))
        value = None if is_none else (yield from _json_value(source))
        arguments = as_arguments(value) if is_none or value is not None else None
        is_cut = mark == END and source.is_cut
        if arguments is None or is_cut or not state.may_call(name, is_whole=mark != END):
            return False
        state.add(name, arguments)
        return True


JSON_ARGUMENTS = JsonArguments()


def _json_value(source: Source) -> Steps[str | None]:
    """Read a value as JSON; None if the answer ends before it."""
    parts: list[str] = []
    is_whole = yield from source.read_value(ValueReader(parts.append))
    return "".join(parts) if is_whole and parts else None


def as_arguments(value: str | None) -> str | None:
    """The JSON object that arguments stand for which are written as a text, or left out; None if they are no object."""
    if value is None or value in ("null", "[]", '""'):
        return "{}"
    if value.startswith('"'):
        parts: list[str] = []
        reader = ValueReader(parts.append)
        text = json.loads(value).strip() or "{}"
        end = reader.read(text, 0)
        value = "".join(parts) if reader.done and not text[end:].strip() else ""
    return value if value.startswith("{") else None


@dataclass(frozen=True)
class CallParser:
    """Parses the calls of one request's answers.

    Attributes:
        grammar: how they are written.
        tools: JSON schemas of the functions' parameters by name.
    """

    grammar: AnswerGrammar
    tools: Mapping[str, Any]

    def parse(self, source: Source, output: Output) -> Steps[None]:
        """Parse an answer."""
        return self.grammar.parse(source, output, self.tools)

    @property
    def marked(self) -> Grammar | None:
        """The grammar if markers stand before calls."""
        return self.grammar if isinstance(self.grammar, Grammar) and self.grammar.opening else None
