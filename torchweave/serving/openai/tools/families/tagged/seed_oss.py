"""Calls of Seed-OSS: those of Qwen3-Coder between tags of another name."""

from __future__ import annotations

from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.tagged import function_grammar

FAMILY = Family(
    name="seed_oss",
    models="Seed-OSS",
    source="chat template of ByteDance-Seed/Seed-OSS-36B-Instruct",
    grammar=function_grammar("seed:tool_call"),
    template=("<seed:tool_call>",),
)
