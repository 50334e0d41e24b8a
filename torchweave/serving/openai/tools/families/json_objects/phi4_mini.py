"""Calls of Phi-4-mini: a list of JSON objects after a word."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="phi4_mini",
    models="Phi-4-mini",
    source="model card of microsoft/Phi-4-mini-instruct",
    grammar=Grammar((JsonCall(),), opening=("functools",)),
    tags=(object_list("functools", ""),),
    template=("functools[",),
)
