"""Calls of InternLM: a JSON object between tokens."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ObjectTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="internlm",
    models="InternLM 2, 2.5 and 3",
    source="chat template and chat format of internlm/internlm2_5-7b-chat",
    grammar=Grammar((JsonCall(),), opening=("<|action_start|><|plugin|>",), closing=("<|action_end|>",)),
    tags=(ObjectTags(call=("<|action_start|><|plugin|>", "<|action_end|>"), keys=("name", "parameters")),),
    template=("<|action_start|>",),
    special_tokens=True,
)
