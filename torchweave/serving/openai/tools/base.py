"""Parts of an answer, and the search for markers in text that arrives in parts."""

from __future__ import annotations

from dataclasses import dataclass


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


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """Split a text at the first of `markers` in it.

    Returns:
        The text before the marker, the marker, and the text after it. Without a marker: the text that is certainly before one,
        "", and the end of the text that may be the beginning of a marker.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found, key=lambda hit: (hit[0], -len(hit[1])))  # the longest of those at one place
        return text[:at], marker, text[at + len(marker) :]
    keep = len(text) - max(_partial_match_length(text, marker) for marker in markers)
    return text[:keep], "", text[keep:]


def _partial_match_length(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    tail = text[1 - len(marker) :] if len(marker) > 1 else ""
    at = tail.find(marker[0])
    while at >= 0 and not marker.startswith(tail[at:]):
        at = tail.find(marker[0], at + 1)
    return len(tail) - at if at >= 0 else 0
