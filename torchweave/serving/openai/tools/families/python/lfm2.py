"""Calls of LFM2: a list of calls in Python, or of JSON objects, between tokens."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import PythonTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall, PythonCall

FAMILY = Family(
    name="lfm2",
    models="LFM2, LFM2.5",
    source="chat template of LiquidAI/LFM2-1.2B",
    grammar=Grammar((JsonCall(), PythonCall()), opening=("<|tool_call_start|>",), closing=("<|tool_call_end|>",)),
    tags=(PythonTags(section=("<|tool_call_start|>", "<|tool_call_end|>"), in_list=True),),
    template=("<|tool_call_start|>", "<|tool_list_start|>"),
    special_tokens=True,
)
