"""Interface of tool-call parsers, and helpers to hold back text that may be part of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """Start of a call, the `index`-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """Further JSON text of a call's arguments."""

    index: int
    text: str


ParserDelta = TextDelta | ReasoningDelta | Call | ArgumentsDelta


class ToolCallParser(Protocol):
    """Parses one answer incrementally. The results of all `feed`s and of `finish` make up the answer."""

    def feed(self, text: str) -> list[ParserDelta]:
        """Add text of the answer; returns the parts that are unambiguous by now."""
        ...

    def finish(self) -> list[ParserDelta]:
        """End the answer; returns the text that was held back."""
        ...


class WhitespaceBuffer:
    """Holds back white space until text follows: around calls it is not part of the answer."""

    def __init__(self) -> None:
        self._whitespace = ""
        self._after_call = False  # only white space since the last call

    def text(self, text: str) -> list[ParserDelta]:
        text = self._whitespace + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        stripped = text.rstrip()
        self._whitespace = text[len(stripped) :]
        return [TextDelta(stripped)] if stripped else []

    def call(self) -> None:
        """Drop the white space before a call."""
        self._whitespace, self._after_call = "", True

    def finish(self, had_calls: bool) -> list[ParserDelta]:
        whitespace, self._whitespace = self._whitespace, ""
        return [TextDelta(whitespace)] if whitespace and not had_calls else []


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """Split a text at the first of `markers` in it.

    Returns:
        The text before the marker, the marker, and the text after it. Without a marker: the text that is certainly before one,
        "", and the end of the text that may be the beginning of a marker.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    keep = len(text) - max(_partial_match_length(text, marker) for marker in markers)
    return text[:keep], "", text[keep:]


def _partial_match_length(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
