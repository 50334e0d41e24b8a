"""Calls of FunctionGemma: a name, then keys and values in a notation of its own."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonArguments

FAMILY = Family(
    name="functiongemma",
    models="FunctionGemma",
    source="chat template of google/functiongemma-270m-it",
    grammar=Grammar(
        (
            HeadedCall(
                regex.compile(rf"call:\s*{NAME}(?=\s*\{{)"), JsonArguments((), ("<escape>", '"'), bare_keys=True)
            ),
        ),
        opening=("<start_function_call>",),
        closing=("<end_function_call>",),
    ),
    template=("<start_function_call>",),
    special_tokens=True,
)
