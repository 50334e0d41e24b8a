"""Calls of MiniMax-M3: invocations with nested elements, before each tag of which a token stands."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall
from torchweave.serving.openai.tools.nested import NestedArguments

_TOKEN = "]<]minimax[>["
_HEAD = regex.compile(rf'{regex.escape(_TOKEN)}<invoke name="{NAME}">')
_ARGUMENTS = NestedArguments(_TOKEN, f"{_TOKEN}</invoke>")

FAMILY = Family(
    name="minimax_m3",
    models="MiniMax-M3",
    source="chat template of MiniMaxAI/MiniMax-M3",
    grammar=Grammar(
        (HeadedCall(_HEAD, _ARGUMENTS, (regex.compile(rf"\s*{regex.escape(_TOKEN)}</invoke>"),)),),
        opening=(f"{_TOKEN}<tool_call>",),
        closing=(f"{_TOKEN}</tool_call>",),
        brackets="",
    ),
    template=(_TOKEN,),
    special_tokens=True,
)
