"""Calls of GLM 4.5 and later: a name, then keys and values between tags."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall
from torchweave.serving.openai.tools.source import END
from torchweave.serving.openai.tools.tagged import key_value_arguments

_HEAD = regex.compile(rf"\s*{NAME}(?=\s*(?:<arg_key>|</tool_call>|{END}))")
_ARGUMENTS = key_value_arguments("", "", "</tool_call>", r"<tool_call>\s*[^\s<>{}]{1,256}\s*(?:<arg_key>|</tool_call>)")

FAMILY = Family(
    name="glm45",
    models="GLM-4.5, 4.6, 4.7, GLM-5",
    source="chat template of zai-org/GLM-4.5",
    grammar=Grammar((HeadedCall(_HEAD, _ARGUMENTS),), opening=("<tool_call>",), closing=("</tool_call>",)),
    tags=(
        ParameterTags(
            call=("<tool_call>{name}\n", "</tool_call>"),
            parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    template=("<arg_key>",),
    aliases=("glm47",),
)
