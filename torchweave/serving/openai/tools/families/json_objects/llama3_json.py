"""Calls of Llama 3: an answer of JSON objects, maybe after a token."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import ObjectTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall, PythonCall

FAMILY = Family(
    name="llama3_json",
    models="Llama 3.1, 3.2 and 3.3",
    source="chat template of meta-llama/Llama-3.1-8B-Instruct",
    grammar=Grammar(
        (JsonCall(), PythonCall(suffix=".call")), opening=("<|python_tag|>",), start=regex.compile(r"\s*(?=\{)")
    ),
    tags=(ObjectTags(keys=("name", "parameters")),),
    template=("<|python_tag|>", '"parameters": dictionary'),
    special_tokens=True,
)
