"""JSON schemas of requests: their references, and what a grammar can hold of them.

Schemas come from pydantic, zod, OpenAPI and by hand. What no grammar expresses (`not`, `uniqueItems`, formats of one's own) is
left out where a request does not insist on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

_LITERALS = ("enum", "const", "default", "examples", "example")
"""Keywords whose values are data, not schemas."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by a name, which may be that of a keyword."""
Errors = Callable[[dict[str, Any], bool], tuple[str, list[str]]]
"""`errors(schema, lenient)`: why a grammar of a schema fails, empty if it does not, and warnings about what it leaves out."""


def map_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema in which each schema within is replaced by `change` of it, the innermost first."""
    if isinstance(schema, list):
        return [map_schema(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return change(
        {
            name: value
            if name in _LITERALS
            else {key: map_schema(each, change) for key, each in value.items()}
            if name in _BY_NAME and isinstance(value, dict)
            else map_schema(value, change)
            for name, value in schema.items()
        }
    )


def rebase_refs(schema: Any, place: str) -> Any:
    """Rewrite a schema's local references for its position `place` in another schema."""
    if isinstance(schema, list):
        return [rebase_refs(each, place) for each in schema]
    if not isinstance(schema, dict) or isinstance(
        schema.get("$id"), str
    ):  # references resolve within a schema with an id
        return schema
    rebased: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            rebased[name] = place + value[1:]
        elif name in _BY_NAME and isinstance(value, dict):
            rebased[name] = {key: rebase_refs(each, place) for key, each in value.items()}
        else:
            rebased[name] = value if name in _LITERALS else rebase_refs(value, place)
    return rebased


def endless_ref(schema: Any) -> str | None:
    """A local reference that leads back to itself without any content, which no value satisfies; None if there is none."""
    grounded: dict[str, bool] = {}

    def is_grounded(part: Any, within: frozenset[str]) -> bool:
        if not isinstance(part, dict):
            return True
        ref = part.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and not leads_out(ref, within):
            return False
        if not all(is_grounded(each, within) for each in part.get("allOf") or ()):
            return False
        return all(
            any(is_grounded(each, within) for each in part[name])
            for name in ("anyOf", "oneOf")
            if isinstance(part.get(name), list) and part[name]
        )

    def leads_out(ref: str, within: frozenset[str]) -> bool:
        if ref in within:
            return False
        if ref not in grounded:
            grounded[ref] = is_grounded(_target(schema, ref), within | {ref})
        return grounded[ref]

    return next((ref for ref in _refs(schema) if not leads_out(ref, frozenset())), None)


def _refs(schema: Any) -> Iterator[str]:
    """The local references of a schema."""
    found: list[str] = []

    def note(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
            found.append(part["$ref"])
        return part

    map_schema(schema, note)
    return iter(found)


def _target(schema: Any, ref: str) -> Any:
    """What a local reference points to; None if there is nothing."""
    for name in ref.lstrip("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema


def loosen(schema: dict[str, Any], errors: Errors) -> tuple[dict[str, Any], list[str]]:
    """What a grammar can hold of a schema, and what it cannot: sentences, none if it holds all of it.

    Args:
        errors: see `Errors`.

    Raises:
        ValueError: the schema is invalid, or no value satisfies it.
    """
    if not errors(schema, False)[0]:
        return schema, []
    schema, removed = _without_unsupported(schema, errors)
    error, warnings = errors(schema, True)
    if error:
        raise ValueError(error)
    return schema, [*removed, *warnings]


def _without_unsupported(schema: dict[str, Any], errors: Errors) -> tuple[dict[str, Any], list[str]]:
    """Leave out patterns and bounds that are valid, but that no grammar can hold."""
    removed: list[str] = []

    def change(part: dict[str, Any]) -> dict[str, Any]:
        pattern = part.get("pattern")
        if isinstance(pattern, str) and "not supported" in errors({"type": "string", "pattern": pattern}, True)[0]:
            removed.append(f"pattern {json.dumps(pattern)[:80]}")
            part = {name: value for name, value in part.items() if name != "pattern"}
        bounds = {
            name: part[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in part
        }
        if bounds and "Failed to generate regex" in errors({"type": part.get("type", "number"), **bounds}, True)[0]:
            removed.append("bounds " + ", ".join(f"{name} {value}" for name, value in bounds.items()))
            part = {name: value for name, value in part.items() if name not in bounds}
        return part

    return map_schema(schema, change), removed
