"""The streaming core of the parsers: a parser is a generator over the text that has arrived, which waits wherever it needs more.

What a parser decides depends on the text alone and never on how it was cut: a whole answer is a stream of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import regex

from torchweave.serving.openai.tools.base import ArgumentsDelta, Call, ParserDelta, ReasoningDelta, TextDelta, split_at
from torchweave.serving.openai.tools.values import ValueReader

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
"""A part of a parser: it yields to wait for more text, and returns a value."""
END = "\U0010ffff"
"""Stands after the last character of an answer, so that patterns can ask for the end. No text has it: it is a noncharacter."""
MAX_HEAD = 1024
"""Longest text that a pattern may wait for, in characters; a longer one does not match."""
_PART = 1 << 14  # a long text is parsed in parts of this size, so that what is left of it is not copied too often


class Source:
    """The text that has arrived and was not taken yet.

    Attributes:
        num_taken: characters that were taken.
        is_cut: the answer was ended by a limit, not by the model.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self.is_cut = False
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        """Append text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def put_back(self, text: str) -> None:
        """Prepend the last text that was taken."""
        self.num_taken -= len(text)
        if self._record is not None:
            self._record = ["".join(self._record).removesuffix(text)]
        self.add("")
        self._text = text + self._text

    def take(self, count: int) -> str:
        """Consume the next `count` characters."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        self.num_taken += count
        if self._held is not None:
            self._held.append(taken)
        if self._record is not None:
            self._record.append(taken)
        return taken

    # -- what may turn out not to be a call ----------------------------------------------------------------------------

    def hold(self) -> None:
        """Remember what is taken from now on."""
        self._held = []

    def release(self) -> str:
        """Return what was taken since `hold`, and forget it."""
        held, self._held = self._held, None
        return "".join(held or ())

    def record(self) -> None:
        """Keep what is taken from now on, whether it is a call or not."""
        self._record = []

    def recorded(self) -> str:
        """Return what was taken since `record`, and end it."""
        record, self._record = self._record, None
        return "".join(record or ())

    # -- steps ---------------------------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """The next character; END at the end."""
        while self._at >= len(self._text):
            yield
        return self._text[self._at]

    def match(self, pattern: regex.Pattern[str]) -> Steps[regex.Match[str] | None]:
        """The match of a pattern at this place, once no further text can change it."""
        while True:
            match = pattern.match(self._text, self._at, partial=True)
            size = len(self._text) - self._at if match is None or match.partial else match.end() - self._at
            if match is None or size > MAX_HEAD:
                return None
            if not match.partial and (match.end() < len(self._text) or self._text.endswith(END)):
                return match
            yield

    def accept(self, pattern: regex.Pattern[str]) -> Steps[regex.Match[str] | None]:
        """Take the match of a pattern at this place, if there is one."""
        match = yield from self.match(pattern)
        if match is not None:
            self.take(match.end() - match.start())
        return match

    def starts_with(self, *markers: str) -> Steps[str]:
        """Which of the markers is next; the longest of several, empty if none."""
        while True:
            text = self._text[self._at : self._at + MAX_HEAD]
            if any(len(marker) > len(text) and marker.startswith(text) for marker in markers):
                yield
                continue
            return max((marker for marker in markers if text.startswith(marker)), key=len, default="")

    def skip(self, chars: str) -> Steps[None]:
        """Take the next characters as long as they are among `chars`."""
        while (yield from self.peek()) in chars:
            rest = self._text[self._at :]
            self.take(len(rest) - len(rest.lstrip(chars)))

    def read_until(self, write: Callable[[str], None], *markers: str) -> Steps[str]:
        """Take the text before the first of the markers; `write` is given the parts as they come.

        Returns:
            The marker, which is next; empty at the end.
        """
        while True:
            before, marker, _ = split_at(self._text[self._at :], *markers, END)
            if before:
                write(self.take(len(before)))
            if marker:
                return "" if marker == END else marker
            yield

    def read_value(self, reader: ValueReader) -> Steps[bool]:
        """Give a reader of a value the text until it is done; returns whether it was before the end."""
        while True:
            is_end = self._text.endswith(END)
            text = self._text[: -len(END)] if is_end else self._text
            self.take(reader.read(text, self._at) - self._at)
            if is_end:
                reader.finish()
            if reader.done or is_end:
                return reader.done
            yield


class Output:
    """The parts of an answer. White space next to a call is its separator unless text stands on both sides."""

    def __init__(self) -> None:
        self._deltas: list[ParserDelta] = []
        self._space = ""  # held back: text may follow
        self._has_text = False
        self.num_calls = 0

    def text(self, text: str) -> None:
        """Add text of the answer."""
        text = self._space + text
        if not self._has_text and self.num_calls:
            text = text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._has_text = True
            self._add(TextDelta(stripped))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        if text:
            self._add(ReasoningDelta(text))

    def call(self, name: str) -> None:
        """Begin a call."""
        if not self._has_text:
            self._space = ""
        self._add(Call(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add JSON text of the last call's arguments."""
        if text:
            self._add(ArgumentsDelta(self.num_calls - 1, text))

    def end(self) -> None:
        """End the answer: white space at its end is text if it has no calls."""
        if self._space and not self.num_calls:
            self._deltas.append(TextDelta(self._space))
        self._space = ""

    def _add(self, delta: ParserDelta) -> None:
        self._deltas.append(delta)

    def drain(self) -> list[ParserDelta]:
        """Return the parts since the last call of this method, neighbors of one kind joined."""
        deltas, self._deltas = self._deltas, []
        groups: list[list[ParserDelta]] = []
        for delta in deltas:
            if groups and not isinstance(delta, Call) and _kind(groups[-1][0]) == _kind(delta):
                groups[-1].append(delta)
            else:
                groups.append([delta])
        return [_join(group) for group in groups]


def _kind(delta: ParserDelta) -> tuple[type, int]:
    return type(delta), delta.index if isinstance(delta, ArgumentsDelta) else 0


def _join(group: list[ParserDelta]) -> ParserDelta:
    first = group[0]
    if isinstance(first, Call) or len(group) == 1:
        return first
    text = "".join(delta.text for delta in group if not isinstance(delta, Call))
    return ArgumentsDelta(first.index, text) if isinstance(first, ArgumentsDelta) else type(first)(text)


class StreamParser:
    """Runs a parser over the parts of an answer as they arrive.

    Args:
        run: the parser, a generator over a source that writes to an output.
    """

    def __init__(self, run: Callable[[Source, Output], Steps[object]]) -> None:
        self._source, self._output = Source(), Output()
        self._steps = run(self._source, self._output)
        self._is_done = False
        self._advance()

    def feed(self, text: str) -> list[ParserDelta]:
        """Add text of the answer; returns the parts that are unambiguous by now."""
        for at in range(0, len(text), _PART):
            self._source.add(text[at : at + _PART].replace(END, "\N{REPLACEMENT CHARACTER}"))
            self._advance()
        return self._output.drain()

    def finish(self, is_cut: bool = False) -> list[ParserDelta]:
        """End the answer, which may be cut off; returns what was held back."""
        self._source.is_cut = is_cut
        self._source.add(END)
        self._advance()
        self._output.end()
        return self._output.drain()

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self
