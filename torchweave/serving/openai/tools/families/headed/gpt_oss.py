"""Answers of gpt-oss: messages on channels."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import HeadedTags, optional, pattern, text
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.harmony import HarmonyGrammar

FAMILY = Family(
    name="gpt_oss",
    models="gpt-oss",
    source="openai/harmony, docs/format.md",
    grammar=HarmonyGrammar(),
    tags=(
        HeadedTags(
            call=("<|channel|>commentary to=functions.{name}", ""),
            head=(pattern(" ?"), optional(text("<|constrain|>json")), text("<|message|>")),
            tail=(optional(text("<|call|>")),),
        ),
    ),
    template=("<|channel|>",),
    special_tokens=True,
    aliases=("openai",),
)
