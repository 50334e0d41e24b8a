"""Calls of Command: a list of JSON objects between tokens; the text stands between tokens, too."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="cohere",
    models="Command R7B, Command A and later",
    source="chat template of CohereLabs/c4ai-command-a-03-2025",
    grammar=Grammar(
        (JsonCall(names=("tool_name", "name")),),
        opening=("<|START_ACTION|>",),
        closing=("<|END_ACTION|>",),
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    tags=(
        object_list(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            keys=("tool_name", "parameters"),
            first={"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,4}$"}},
        ),
    ),
    template=("<|START_ACTION|>",),
    special_tokens=True,
    aliases=("cohere_command",),
)
