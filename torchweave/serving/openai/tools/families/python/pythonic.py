"""Calls of Llama 3.2 and 4: an answer that is a list of calls in Python."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import PythonTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, PythonCall

FAMILY = Family(
    name="pythonic",
    models="Llama 3.2, Llama 4, Gemma 3 (as its guide prompts it), ToolACE",
    source="chat template of meta-llama/Llama-4-Scout-17B-16E-Instruct",
    grammar=Grammar(
        (PythonCall(),),
        opening=("<|python_start|>", "<|python_tag|>"),
        closing=("<|python_end|>",),
        start=regex.compile(r"\s*(?=\[)"),
    ),
    tags=(PythonTags(section=("", ""), in_list=True),),
    template=("func_name1(params_name1",),
    special_tokens=True,
    aliases=("llama4_pythonic",),
)
