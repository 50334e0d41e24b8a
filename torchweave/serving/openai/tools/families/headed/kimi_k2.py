"""Calls of Kimi K2: a counted name, then JSON, between tokens."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import HeadedTags, pattern, text
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonArguments

_HEAD = regex.compile(
    rf"<\|tool_call_begin\|>\s*(?:functions\.)?{NAME}(?::\d{{1,9}})?\s*<\|tool_call_argument_begin\|>\s*(?=.)",
    regex.DOTALL,
)

FAMILY = Family(
    name="kimi_k2",
    models="Kimi K2",
    source="chat template of moonshotai/Kimi-K2-Instruct",
    grammar=Grammar(
        (HeadedCall(_HEAD, JsonArguments(), (regex.compile(r"\s*<\|tool_call_end\|>"),)),),
        opening=("<|tool_calls_section_begin|>",),
        closing=("<|tool_calls_section_end|>",),
    ),
    tags=(
        HeadedTags(
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=("<|tool_call_begin|>functions.{name}:", "<|tool_call_end|>"),
            head=(pattern("[0-9]{1,4}"), text("<|tool_call_argument_begin|>")),
        ),
    ),
    template=("<|tool_calls_section_begin|>",),
    special_tokens=True,
    id_form="counted",
)
