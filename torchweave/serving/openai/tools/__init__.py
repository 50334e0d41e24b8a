"""Tool calls: format detection and incremental parsing."""

from __future__ import annotations

from torchweave.serving.openai.tools.base import ArgumentsDelta, Call, ParserDelta, TextDelta, ToolCallParser
from torchweave.serving.openai.tools.select import (
    detect_tool_format,
    forced_schema,
    make_forced_parser,
    make_tool_parser,
)

__all__ = [
    "ArgumentsDelta",
    "Call",
    "ParserDelta",
    "TextDelta",
    "ToolCallParser",
    "detect_tool_format",
    "forced_schema",
    "make_forced_parser",
    "make_tool_parser",
]
