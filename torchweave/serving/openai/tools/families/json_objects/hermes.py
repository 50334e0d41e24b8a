"""Calls of Hermes, Qwen2.5 and Qwen3: a JSON object between tags."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ObjectTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="hermes",
    models="Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, MiMo-7B",
    source="chat template of Qwen/Qwen3-8B",
    grammar=Grammar((JsonCall(),), opening=("<tool_call>",), closing=("</tool_call>",)),
    tags=(ObjectTags(call=("<tool_call>", "</tool_call>")),),
    template=("<tool_call>",),
)
