"""Calls of Mistral: names before arguments, each after a token, or a list of JSON objects after one."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import HeadedTags, object_list, optional, pattern, sequence, text
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonArguments, JsonCall

_TOKEN = "[TOOL_CALLS]"
_HEAD = regex.compile(rf"\s*{NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?(?=\s*(?:\{{|\[TOOL_CALLS\]|\U0010ffff))")
_CALL_ID = optional(sequence(text("[CALL_ID]"), pattern("[a-zA-Z0-9]{9}")))

FAMILY = Family(
    name="mistral",
    models="Mistral 7B v0.3 and later, Mixtral, Ministral, Magistral, Devstral",
    source="chat template of mistralai/Mistral-Small-3.2-24B-Instruct-2506; mistral-common",
    grammar=Grammar((JsonCall(), HeadedCall(_HEAD, JsonArguments((_TOKEN,)))), opening=(_TOKEN,)),
    tags=(
        HeadedTags(call=(f"{_TOKEN}{{name}}", ""), head=(_CALL_ID, text("[ARGS]")), template="[ARGS]"),
        object_list(_TOKEN, ""),
    ),
    template=(_TOKEN,),
    special_tokens=True,
    id_form="nine",
)
