"""Calls of Gemma 4: a name, then keys and values in a notation of its own."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonArguments

FAMILY = Family(
    name="gemma4",
    models="Gemma 4",
    source="chat template of google/gemma-4-E2B-it",
    grammar=Grammar(
        (HeadedCall(regex.compile(rf"call:\s*{NAME}(?=\s*\{{)"), JsonArguments((), ('<|"|>', '"'), bare_keys=True)),),
        opening=("<|tool_call>",),
        closing=("<tool_call|>",),
    ),
    template=("<|tool_call>",),
    special_tokens=True,
)
