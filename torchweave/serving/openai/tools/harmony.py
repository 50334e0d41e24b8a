"""Parser of the harmony format (gpt-oss): reasoning, text and calls are messages on channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from torchweave.serving.openai.tools.grammar import JSON_ARGUMENTS, Parsing
from torchweave.serving.openai.tools.source import END, Output, Source, Steps

_HEADS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEAD = regex.compile(
    r"\s*(?:<\|start\|>)?(?:assistant)?(?:\s*to=[^\s<]{1,256})?\s*(?:<\|channel\|>[^<]{0,256})?(?:<\|constrain\|>[^<]{0,64})?"
    r"<\|message\|>"
)
_CHANNEL = regex.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = regex.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyGrammar:
    """`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`

    The channel `analysis` is reasoning, `final` and `commentary` are text, and a message to a function is its call. One to another
    recipient, such as a built-in tool, is reasoning. What stands outside messages is text. A message ends where the next begins
    if its end is missing; one to a function has the end of its arguments.
    """

    def parse(self, source: Source, output: Output, tools: Mapping[str, Any]) -> Steps[None]:
        """Parse an answer."""
        state = Parsing(source, output, tools)
        while (yield from source.peek()) != END:
            head = yield from source.accept(_HEAD)
            if head is not None:
                yield from self._read_message(state, head[0])
                continue
            marker = yield from source.starts_with(*_HEADS, *_ENDS)
            stray = source.take(len(marker))
            output.text(stray if stray in _HEADS else "")
            yield from source.read_until(output.text, *_HEADS, *_ENDS)

    def _read_message(self, state: Parsing, head: str) -> Steps[None]:
        source, channel, recipient = state.source, _CHANNEL.search(head), _RECIPIENT.search(head)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient is not None else ""
        is_function = recipient is not None and (recipient[1].startswith(_FUNCTIONS) or name in state.tools)
        is_hidden = not is_function and (recipient is not None or (channel is not None and channel[1] == "analysis"))
        if is_function:
            source.hold()
            if not (yield from JSON_ARGUMENTS.read(state, name)):
                state.output.text(source.release())
        yield from source.read_until(state.output.reasoning if is_hidden else state.output.text, *_HEADS, *_ENDS)
        source.take(len((yield from source.starts_with(*_ENDS))))
