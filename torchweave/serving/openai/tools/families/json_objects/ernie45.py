"""Calls of ERNIE 4.5: JSON objects between tags; the text may stand between tags, too."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ObjectTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="ernie45",
    models="ERNIE 4.5 Thinking",
    source="chat template of baidu/ERNIE-4.5-21B-A3B-Thinking",
    grammar=Grammar(
        (JsonCall(),), opening=("<tool_call>",), closing=("</tool_call>",), ignored=("<response>", "</response>")
    ),
    tags=(ObjectTags(call=("<tool_call>", "</tool_call>")),),
    template=("<response>",),
    special_tokens=True,
)
