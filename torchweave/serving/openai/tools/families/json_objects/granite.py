"""Calls of Granite 3: a list of JSON objects after a token."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="granite",
    models="Granite 3.0",
    source="chat template of ibm-granite/granite-3.0-8b-instruct",
    grammar=Grammar((JsonCall(),), opening=("<|tool_call|>",)),
    tags=(object_list("<|tool_call|>", ""),),
    template=("<|tool_call|>",),
    special_tokens=True,
)
