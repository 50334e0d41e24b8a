"""Calls of DeepSeek V4: those of V3.2 between tags of another name."""

from __future__ import annotations

from torchweave.serving.openai.tools.call_tags import ParameterTags
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.tagged import invoke_grammar

FAMILY = Family(
    name="deepseek_v4",
    models="DeepSeek V4",
    source="encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Pro",
    grammar=invoke_grammar(("<｜DSML｜tool_calls>",), "</｜DSML｜tool_calls>", "｜DSML｜"),
    tags=(
        ParameterTags(
            section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            call=('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>"),
            parameter=('<｜DSML｜parameter name="{key}" string="true">', "</｜DSML｜parameter>\n"),
            value='<｜DSML｜parameter name="{key}" string="false">',
        ),
    ),
    template=("｜DSML｜tool_calls",),
    special_tokens=True,
)
