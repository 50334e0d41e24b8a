"""What a parser of calls gives out, and how text that may yet turn out to be a call is held back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call begins: the `index`-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


ParserDelta = TextDelta | Call | ArgumentsDelta


class ToolCallParser(Protocol):
    """Finds calls in one answer. The pieces of all `feed`s and of `finish` are the answer."""

    def feed(self, text: str) -> list[ParserDelta]:
        """More of the answer; what is certain of it by now."""
        ...

    def finish(self) -> list[ParserDelta]:
        """The answer has ended; what was held back."""
        ...


class WhitespaceBuffer:
    """Holds white space back until text follows: between and around calls it is no part of the answer."""

    def __init__(self) -> None:
        self._held = ""
        self._begins = False  # nothing but white space came since the last call

    def text(self, text: str) -> list[ParserDelta]:
        text = self._held + text
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        solid = text.rstrip()
        self._held = text[len(solid) :]
        return [TextDelta(solid)] if solid else []

    def call(self) -> None:
        """A call follows: what is held is dropped."""
        self._held, self._begins = "", True

    def finish(self, had_calls: bool) -> list[ParserDelta]:
        held, self._held = self._held, ""
        return [TextDelta(held)] if held and not had_calls else []


def partial_match_length(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
