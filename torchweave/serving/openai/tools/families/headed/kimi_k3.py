"""Calls of Kimi K3: arguments between tokens that tell texts from JSON."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonArguments
from torchweave.serving.openai.tools.source import END
from torchweave.serving.openai.tools.tagged import TaggedArguments

_OPEN, _CLOSE, _SEP = (regex.escape(token) for token in ("<|open|>", "<|close|>", "<|sep|>"))
_HEAD = rf'{_OPEN}call tool="{NAME}"[^<]{{0,64}}{_SEP}\s*'
_ARGUMENTS = TaggedArguments(
    key=rf'{_OPEN}argument key="(?P<key>[^"<]{{1,256}})"(?: type="(?P<kind>\w+)")?\s*{_SEP}',
    opening="<|open|>argument",
    closing="<|close|>argument<|sep|>",
    call_end="<|close|>call<|sep|>",
    section_end="<|close|>tools<|sep|>",
    next_call=rf"{_OPEN}call tool=|{_CLOSE}message",
)
_JSON = HeadedCall(
    regex.compile(rf"{_HEAD}{_OPEN}json[^<]{{0,64}}{_SEP}"),
    JsonArguments(),
    (regex.compile(rf"\s*{_CLOSE}json{_SEP}"), regex.compile(rf"\s*{_CLOSE}call{_SEP}")),
)

FAMILY = Family(
    name="kimi_k3",
    models="Kimi K3",
    source="encoding_k3.py of moonshotai/Kimi-K3",
    grammar=Grammar(
        (_JSON, HeadedCall(regex.compile(rf"{_HEAD}(?=<|{END})"), _ARGUMENTS)),
        opening=("<|open|>tools<|sep|>",),
        closing=("<|close|>tools<|sep|>",),
        ignored=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ),
    template=("<|open|>tools",),
    special_tokens=True,
)
