"""Bounds of the lists in request bodies: a list is measured before its items are looked at, and the first wrong item ends it.

The bounds stand in the table of docs/reference/http.md.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema

MAX_ITEMS = 16_384
"""Items of a list without a bound of its own: messages, parts, blocks, prompts, choices."""
MAX_TOOLS = 2_048
MAX_STOPS = 1_024
"""Stop strings, and stop tokens."""
MAX_STOP_REGEXES = 8
MAX_BAD_WORDS = 2_048
MAX_BIASES = 16_384
MAX_ALLOWED_TOKENS = 1 << 18
_OPAQUE = frozenset(("metadata", "default", "serialization", "cls"))
"""Entries of a core schema that hold no schemas of values."""


def _with_bounds(schema: Any) -> Any:
    """A core schema in which each list has a bound and ends with its first error."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_with_bounds, schema))
    if not isinstance(schema, dict):
        return schema
    inner = {name: value if name in _OPAQUE else _with_bounds(value) for name, value in schema.items()}
    if inner.get("type") == "list":
        inner = {"max_length": MAX_ITEMS, **inner, "fail_fast": True}
    return inner


class ModelWithBounds(BaseModel):
    """A model whose lists are bounded. Pydantic would look at every item, and note an error of two kilobytes for each wrong one."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _with_bounds(handler(source))
