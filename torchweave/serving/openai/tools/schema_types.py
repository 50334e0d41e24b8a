"""Types of arguments that a model writes as plain text, by the JSON schema of the function's parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchweave.serving.openai.tools.values import as_json

_MAX_DEPTH = 32  # of references and unions; a schema that is nested deeper allows anything
_ANY = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_SIGNS = {  # keywords that apply to values of one type only
    "object": ("properties", "additionalProperties", "required", "patternProperties", "propertyNames", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"),
}


class Parameters:
    """The parameters of a function.

    Args:
        schema: their JSON schema; anything else declares nothing.
        root: the schema in which references are resolved; None: `schema`.
    """

    def __init__(self, schema: Any, root: Any = None) -> None:
        self._own = schema if isinstance(schema, Mapping) else {}
        self._root = self._own if root is None else root
        self._properties: dict[str, Any] = {}
        self._others = self._items = None
        for part in self._alternatives(self._own):
            properties, others = part.get("properties"), part.get("additionalProperties")
            self._properties |= dict(properties) if isinstance(properties, Mapping) else {}
            self._others = others if isinstance(others, Mapping) else self._others
            self._items = part.get("items", self._items)

    def __contains__(self, name: str) -> bool:
        return name in self._properties

    def _schema(self, name: str) -> Any:
        return self._properties.get(name, self._others)

    @property
    def is_closed(self) -> bool:
        """Whether the function has just the arguments that it declares."""
        return bool(self._properties) and self._others is None

    def child(self, name: str) -> Parameters:
        """The properties of an argument that is an object."""
        return Parameters(self._schema(name), self._root)

    @property
    def root(self) -> Any:
        """The schema in which references are resolved."""
        return self._root

    @property
    def items(self) -> Any:
        """Schema of the items of a list."""
        return self._items

    @property
    def types(self) -> list[str]:
        """JSON types that the schema itself allows; empty if it allows any."""
        return self._types(self._own)

    def is_text(self, name: str) -> bool:
        """Whether the argument is a text whatever it looks like."""
        schema = self._schema(name)
        return schema is None or (not self._constants(schema) and self._types(schema) == ["string"])

    def types_of(self, name: str) -> list[str]:
        """JSON types that an argument may have; empty if it may have any."""
        schema = self._schema(name)
        return self._types(schema) if isinstance(schema, Mapping) else []

    def value(self, name: str, text: str) -> Any:
        """The value of an argument that is written as text; the text itself where no other type fits."""
        schema = self._schema(name)
        if schema is None:
            return text
        for constant in self._constants(schema):
            if text == constant or (not isinstance(constant, str) and _same(_decoded(text), constant)):
                return constant
        types = self._types(schema) or [*_ANY - {"string"}, "string"]
        value = _decoded(text)
        kind = _type_of(value)
        if isinstance(value, float) and value.is_integer() and "number" not in types:
            kind = "integer"
        if kind not in types and not (kind == "integer" and "number" in types):
            return text
        # A text that reads as a number is one only if the schema names that type before the text.
        is_number = kind in ("integer", "number")
        before = types[: types.index("string")] if "string" in types else types
        return value if not is_number or kind in before or "number" in before else text

    # -- what a schema allows ------------------------------------------------------------------------------------------

    def _parts(self, schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """The schema and those that apply together with it."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return
        yield schema
        if (target := self._target(schema)) is not None:
            yield from self._parts(target, depth + 1)
        for part in _list(schema.get("allOf")):
            yield from self._parts(part, depth + 1)

    def _alternatives(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """The parts of the schema, and those of its options."""
        for part in self._parts(schema):
            yield part
            for option in _options(part):
                yield from self._parts(option, 1)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What the schema refers to within the parameters."""
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            return None
        target: Any = self._root
        for step in ref.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, Mapping) and step in target:
                target = target[step]
            else:
                return None
        return target

    def _constants(self, schema: Any, depth: int = 0) -> list[Any]:
        """Values that the schema lists, texts first."""
        found: list[Any] = []
        for part in self._parts(schema):
            found += _list(part.get("enum")) + ([part["const"]] if "const" in part else [])
            if depth < _MAX_DEPTH:
                for option in _options(part):
                    found += self._constants(option, depth + 1)
        return sorted(found, key=lambda value: not isinstance(value, str))

    def _types(self, schema: Any, depth: int = 0) -> list[str]:
        """JSON types that the schema allows, in its order; empty if it allows any."""
        allowed: list[str] = []
        for part in self._parts(schema):
            types = self._own_types(part, depth)
            allowed = [kind for kind in types if kind in allowed] or allowed if allowed and types else allowed or types
        return allowed

    def _own_types(self, part: Mapping[str, Any], depth: int) -> list[str]:
        declared = part.get("type")
        types = [declared] if isinstance(declared, str) else [kind for kind in _list(declared) if isinstance(kind, str)]
        types += ["null"] if types and part.get("nullable") is True else []
        if not types and depth < _MAX_DEPTH:
            options = [self._types(option, depth + 1) for option in _options(part)]
            types = [kind for option in options for kind in option] if all(options) else []
        if not types and ("enum" in part or "const" in part):
            values = _list(part.get("enum")) + ([part["const"]] if "const" in part else [])
            types = [_type_of(value) for value in values]
        if not types:
            types = [kind for kind, signs in _SIGNS.items() if any(sign in part for sign in signs)]
        return list(dict.fromkeys(types))


def _options(part: Mapping[str, Any]) -> list[Any]:
    return _list(part.get("anyOf")) + _list(part.get("oneOf"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _decoded(text: str) -> Any:
    """The JSON value, or value of Python, that a text is; else the text."""
    converted = as_json(text)
    if converted is None:
        return text
    try:
        value = json.loads(converted)
    except (ValueError, RecursionError):
        return text
    # A text in quotes, or a number that JSON does not have, stands for itself.
    return text if isinstance(value, str) else value


def _type_of(value: Any) -> str:
    kinds: Iterable[tuple[type, str]] = (
        (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _same(value: Any, constant: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return value == constant and isinstance(value, bool) == isinstance(constant, bool)
