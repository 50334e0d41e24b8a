"""Server-sent events: a JSON body each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

_encode = msgspec.json.encode
_MARK = "\0text\0"


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(body) + b"\n\n"


class TextEventCache:
    """Events that differ in an answer's text alone: written once, with a gap for the text."""

    def __init__(self) -> None:
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by answer: what stands before and behind its text

    def of(self, index: int, text: str, body: Callable[[int, str], dict[str, Any]]) -> bytes:
        """The event of a text; `body` makes it for an answer (by its number) and a text."""
        around = self._around.get(index)
        if around is None:
            before, _, behind = event(body(index, _MARK)).partition(_encode(_MARK))
            around = self._around[index] = before, behind
        return around[0] + _encode(text) + around[1]
