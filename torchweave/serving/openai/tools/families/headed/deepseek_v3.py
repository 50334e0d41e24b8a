"""Calls of DeepSeek V3, R1 and V3.1: a name, then JSON, between tokens."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import HeadedTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonArguments

_NEXT = r"[{<\U0010ffff]"
_FENCE = r"\s*(?:```json)?\s*"
_HEAD = regex.compile(
    rf"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>\s*{NAME}{_FENCE}(?={_NEXT}|```\s*<)|{NAME}\s*<｜tool▁sep｜>\s*(?={_NEXT}))"
)
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

FAMILY = Family(
    name="deepseek_v3",
    models="DeepSeek V3, V3-0324, R1-0528, V3.1",
    source="chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1",
    grammar=Grammar(
        (HeadedCall(_HEAD, JsonArguments(), (regex.compile(r"\s*```"), regex.compile(r"\s*<｜tool▁call▁end｜>"))),),
        opening=("<｜tool▁calls▁begin｜>",),
        closing=("<｜tool▁calls▁end｜>",),
    ),
    tags=(
        HeadedTags(
            section=_SECTION,
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),
            template="```json",
        ),
        HeadedTags(section=_SECTION, call=("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>")),
    ),
    template=("<｜tool▁calls▁begin｜>",),
    special_tokens=True,
    aliases=("deepseek_v31",),
)
