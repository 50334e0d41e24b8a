"""Calls of Step 3: invocations with parameters between tags, each between tokens."""

from __future__ import annotations

import regex

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import NAME, Grammar, HeadedCall
from torchweave.serving.openai.tools.tagged import TaggedArguments

_BEGIN, _END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_SEP = "(?:<｜tool_sep｜>)?\\s*"
_ARGUMENTS = TaggedArguments(
    key=r'<steptml:parameter name="(?P<key>[^">\n]{1,256})">',
    opening="<steptml:parameter",
    closing="</steptml:parameter>",
    call_end="</steptml:invoke>",
    section_end=_END,
    next_call=f"{_BEGIN}|<｜tool_calls_end｜>|<｜tool_sep｜>",
)
_HEAD = regex.compile(rf'{_SEP}{_BEGIN}\s*(?:function)?\s*{_SEP}<steptml:invoke name="{NAME}">')

FAMILY = Family(
    name="step3",
    models="Step 3",
    source="chat template of stepfun-ai/step3",
    grammar=Grammar(
        (HeadedCall(_HEAD, _ARGUMENTS, (regex.compile(rf"\s*{_END}"),)),),
        opening=("<｜tool_calls_begin｜>",),
        closing=("<｜tool_calls_end｜>",),
    ),
    tags=(
        ParameterTags(
            section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            call=(f'{_BEGIN}function<｜tool_sep｜><steptml:invoke name="{{name}}">', f"</steptml:invoke>{_END}"),
            parameter=('<steptml:parameter name="{key}">', "</steptml:parameter>"),
        ),
    ),
    template=("<steptml:",),
    special_tokens=True,
)
