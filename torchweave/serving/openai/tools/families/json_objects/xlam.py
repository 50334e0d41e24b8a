"""Calls of xLAM: a list of JSON objects, alone, in a fence or between tags."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import object_list
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

FAMILY = Family(
    name="xlam",
    models="xLAM 1 and 2",
    source="model card of Salesforce/Llama-xLAM-2-8b-fc-r",
    grammar=Grammar(
        (JsonCall(),),
        opening=("<tool_call>", "[TOOL_CALLS]", "```json"),
        closing=("</tool_call>", "```"),
        start=regex.compile(r"\s*(?=[\[{])"),
    ),
    tags=(object_list("", ""),),
    template=('"name": "tool_call_name"',),
)
