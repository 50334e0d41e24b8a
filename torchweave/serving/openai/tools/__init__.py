"""Tools: which form a model calls them in, and calls found in its answer as it comes."""

from __future__ import annotations

from torchweave.serving.openai.tools.base import Arguments, Call, CallParser, Piece, Text
from torchweave.serving.openai.tools.select import forced_parser, forced_schema, format_of, parser_for

__all__ = [
    "Arguments",
    "Call",
    "CallParser",
    "Piece",
    "Text",
    "forced_parser",
    "forced_schema",
    "format_of",
    "parser_for",
]
