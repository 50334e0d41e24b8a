"""Calls of Seed-OSS: those of Qwen3-Coder between tags of another name."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.tagged import function_grammar

FAMILY = Family(
    name="seed_oss",
    models="Seed-OSS",
    source="chat template of ByteDance-Seed/Seed-OSS-36B-Instruct",
    grammar=function_grammar("seed:tool_call"),
    tags=(
        ParameterTags(
            call=("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>"),
            parameter=("<parameter={key}>\n", "\n</parameter>\n"),
        ),
    ),
    template=("<seed:tool_call>",),
)
