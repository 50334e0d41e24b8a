"""Calls of OLMo 3: calls in Python, each on a line, between tags."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import SPACE, PythonTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, PythonCall

FAMILY = Family(
    name="olmo3",
    models="OLMo 3",
    source="chat template of allenai/Olmo-3-7B-Instruct",
    grammar=Grammar((PythonCall(),), opening=("<function_calls>",), closing=("</function_calls>",)),
    tags=(PythonTags(section=("<function_calls>", "</function_calls>"), separator=SPACE),),
    template=("<function_calls>",),
)
