"""Calls of Nemotron: a list of JSON objects between tags."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="nemotron_json",
    models="Llama-Nemotron, Nemotron Nano 2",
    source="chat template of nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    grammar=Grammar((JsonCall(),), opening=("<TOOLCALL>",), closing=("</TOOLCALL>",)),
    tags=(object_list("<TOOLCALL>", "</TOOLCALL>"),),
    template=("<TOOLCALL>",),
    special_tokens=True,
)
