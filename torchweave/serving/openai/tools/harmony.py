"""Parser of the harmony format (gpt-oss): reasoning, text and calls are messages on channels."""

from __future__ import annotations

import re
from collections.abc import Collection

from torchweave.serving.openai.tools.base import (
    ArgumentsDelta,
    Call,
    ParserDelta,
    ReasoningDelta,
    TextDelta,
    split_at,
)

_CONTENT = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_HEADS = ("<|channel|>", "<|start|>")
_MAX_HEAD = 512
"""Longest header of a message; a longer one is text."""


class HarmonyParser:
    """`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`

    The channel `analysis` is reasoning, `final` and `commentary` are text, and a message to a known function is its call. One to
    another recipient, such as a built-in tool, is reasoning. An answer that begins without a header is text.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self._tool_names = known
        self._buffer = ""
        self._in_head = True
        self._began = False
        self._num_calls = 0
        self._kind = "text"

    def feed(self, text: str) -> list[ParserDelta]:
        self._buffer += text
        pieces: list[ParserDelta] = []
        while self._buffer and (self._read_head(pieces) if self._in_head else self._read_content(pieces)):
            pass
        return pieces

    def _read_head(self, pieces: list[ParserDelta]) -> bool:
        head, marker, after = self._buffer.partition(_CONTENT)
        if not marker:
            text = self._buffer.lstrip()
            starts = any(each.startswith(text) or text.startswith(each) for each in _HEADS)
            if (starts or self._began) and len(text) < _MAX_HEAD:
                return False
            self._in_head = False  # text without a header
            return True
        self._buffer, self._in_head, self._began = after, False, True
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._tool_names:
            self._kind = "call"
            pieces.append(Call(self._num_calls, recipient[1]))
            self._num_calls += 1
        else:
            hidden = recipient is not None or (channel is not None and channel[1] == "analysis")
            self._kind = "reasoning" if hidden else "text"
        return True

    def _read_content(self, pieces: list[ParserDelta]) -> bool:
        before, marker, self._buffer = split_at(self._buffer, *_ENDS)
        self._add(pieces, before)
        if marker:
            self._in_head = self._began = True
        return bool(marker)

    def _add(self, pieces: list[ParserDelta], text: str) -> None:
        if text and self._kind == "call":
            pieces.append(ArgumentsDelta(self._num_calls - 1, text))
        elif text:
            pieces.append(ReasoningDelta(text) if self._kind == "reasoning" else TextDelta(text))

    def finish(self) -> list[ParserDelta]:
        pieces: list[ParserDelta] = []
        if not (self._in_head and self._began):  # else the header of a message that was cut off
            self._add(pieces, self._buffer)
        return pieces
