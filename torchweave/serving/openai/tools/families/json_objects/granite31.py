"""Calls of Granite 3.1 and later: JSON objects between tags, or a list after one."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ObjectTags, object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="granite31",
    models="Granite 3.1 to 3.3, Granite 4",
    source="chat template of ibm-granite/granite-3.3-8b-instruct",
    grammar=Grammar((JsonCall(),), opening=("<tool_call>", "<|tool_call|>"), closing=("</tool_call>",)),
    tags=(object_list("<|tool_call|>", "", template="<|tool_call|>"), ObjectTags(call=("<tool_call>", "</tool_call>"))),
    special_tokens=True,
    aliases=("granite4",),
)
