"""Calls of Jamba and Hunyuan: a list of JSON objects between tags."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="jamba",
    models="Jamba 1.5 and later, Hunyuan-A13B, MiniMax-M1",
    source="chat template of ai21labs/AI21-Jamba-Mini-1.5",
    grammar=Grammar((JsonCall(),), opening=("<tool_calls>",), closing=("</tool_calls>",)),
    tags=(object_list("<tool_calls>", "</tool_calls>"),),
    template=("<tool_calls>",),
    aliases=("hunyuan_a13b", "minimax"),
)
