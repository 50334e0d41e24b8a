"""Server-sent events with JSON bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

_encode = msgspec.json.encode
_MARK = "\0text\0"


def event(body: dict[str, Any]) -> bytes:
    """Encode an event."""
    return b"data: " + _encode(body) + b"\n\n"


class TextEventCache:
    """Events that differ only in the text: the JSON around the text is encoded once per answer."""

    def __init__(self) -> None:
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by answer: the bytes before and after its text

    def of(self, index: int, text: str, body: Callable[[int, str], dict[str, Any]]) -> bytes:
        """Encode the event of answer `index` with `text`; `body(index, text)` builds its JSON."""
        around = self._around.get(index)
        if around is None:
            before, _, behind = event(body(index, _MARK)).partition(_encode(_MARK))
            around = self._around[index] = before, behind
        return around[0] + _encode(text) + around[1]
