"""Calls of Phi-4-mini as its template writes them: a list of JSON objects between tokens."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="phi4_tool_call",
    models="Phi-4-mini, Phi-4-multimodal",
    source="chat template of microsoft/Phi-4-mini-instruct",
    grammar=Grammar((JsonCall(),), opening=("<|tool_call|>",), closing=("<|/tool_call|>",)),
    tags=(object_list("<|tool_call|>", "<|/tool_call|>"),),
    template=("<|/tool_call|>",),
    special_tokens=True,
)
