"""Calls of MiniMax-M2: invocations with parameters between tags."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.tagged import invoke_grammar

FAMILY = Family(
    name="minimax_m2",
    models="MiniMax-M2 and later",
    source="chat template of MiniMaxAI/MiniMax-M2",
    grammar=invoke_grammar(("<minimax:tool_call>",), "</minimax:tool_call>"),
    tags=(
        ParameterTags(
            section=("<minimax:tool_call>", "</minimax:tool_call>"),
            call=('<invoke name="{name}">\n', "</invoke>"),
            parameter=('<parameter name="{key}">', "</parameter>\n"),
        ),
    ),
    template=("<minimax:tool_call>",),
)
