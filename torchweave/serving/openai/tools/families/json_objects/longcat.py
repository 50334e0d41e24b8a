"""Calls of LongCat: a JSON object between tags, or a name with keys and values between tags."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import ObjectTags, ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall, JsonCall
from torchweave.serving.openai.tools.source import END
from torchweave.serving.openai.tools.tagged import key_value_arguments

_END = "</longcat_tool_call>"
_HEAD = regex.compile(rf"\s*{NAME}(?=\s*(?:<longcat_arg_key>|{_END}|{END}))")
_ARGUMENTS = key_value_arguments(
    "longcat_", "", _END, rf"<longcat_tool_call>\s*[^\s<>]{{1,256}}\s*(?:<longcat_arg_key>|{_END})"
)

FAMILY = Family(
    name="longcat",
    models="LongCat-Flash",
    source="chat templates of meituan-longcat/LongCat-Flash-Chat and later",
    grammar=Grammar((JsonCall(), HeadedCall(_HEAD, _ARGUMENTS)), opening=("<longcat_tool_call>",), closing=(_END,)),
    tags=(
        ParameterTags(
            call=("<longcat_tool_call>{name}\n", "</longcat_tool_call>"),
            parameter=("<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
            template="<longcat_arg_key>",
        ),
        ObjectTags(call=("<longcat_tool_call>", "</longcat_tool_call>")),
    ),
    template=("<longcat_tool_call>",),
    special_tokens=True,
)
