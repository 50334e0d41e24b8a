"""Calls of Hunyuan 3: a name, then keys and values between tokens, which may have a suffix."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall
from torchweave.serving.openai.tools.tagged import key_value_arguments

_SUFFIXES = ("", ":opensource")


def _call(suffix: str) -> HeadedCall:
    head = regex.compile(rf"<tool_call{suffix}>\s*{NAME}\s*<tool_sep{suffix}>")
    end = f"</tool_calls{suffix}>"
    return HeadedCall(
        head,
        key_value_arguments(
            "",
            f"</tool_call{suffix}>",
            end,
            rf"<tool_call{suffix}>\s*[^\s<>{{}}]{{1,256}}\s*<tool_sep{suffix}>",
            suffix,
        ),
    )


FAMILY = Family(
    name="hy_v3",
    models="Hunyuan 3",
    source="chat template of tencent/Hy3-preview",
    grammar=Grammar(
        tuple(map(_call, _SUFFIXES)),
        opening=tuple(f"<tool_calls{suffix}>" for suffix in _SUFFIXES),
        closing=tuple(f"</tool_calls{suffix}>" for suffix in _SUFFIXES),
    ),
    tags=(
        ParameterTags(
            section=("<tool_calls>", "</tool_calls>"),
            call=("<tool_call>{name}<tool_sep>\n", "</tool_call>"),
            parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    template=("<tool_sep",),
    special_tokens=True,
)
