"""Calls of DeepSeek V3.2 and V4: invocations between tags that tell texts from JSON."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.tagged import invoke_grammar

_BAR = "｜DSML｜"

FAMILY = Family(
    name="deepseek_v32",
    models="DeepSeek V3.2",
    source="encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2",
    grammar=invoke_grammar((f"<{_BAR}function_calls>",), f"</{_BAR}function_calls>", _BAR),
    tags=(
        ParameterTags(
            section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            call=('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>"),
            parameter=('<｜DSML｜parameter name="{key}" string="true">', "</｜DSML｜parameter>\n"),
            value='<｜DSML｜parameter name="{key}" string="false">',
        ),
    ),
    template=(f"{_BAR}function_calls",),
    special_tokens=True,
)
