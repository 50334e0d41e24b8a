"""Calls of Qwen3-Coder: arguments between tags, on lines of their own."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.tagged import function_grammar

FAMILY = Family(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen3.5 and later, Nemotron 3 Nano, MiMo-V2-Flash, Step 3.5",
    source="chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct",
    grammar=function_grammar("tool_call"),
    tags=(
        ParameterTags(
            call=("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
            parameter=("<parameter={key}>\n", "\n</parameter>\n"),
        ),
    ),
    template=("<function=",),
    aliases=("qwen3_xml", "mimo", "step3p5"),
)
