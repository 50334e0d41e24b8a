"""Arguments as nested elements, as in XML: the name of an element is a key, and lists are elements `item`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from torchweave.serving.openai.tools.grammar import ArgumentsGrammar, Parsing
from torchweave.serving.openai.tools.schema_types import Parameters
from torchweave.serving.openai.tools.source import Steps

_MAX_DEPTH = 64
_ITEM = "item"


@dataclass(frozen=True)
class NestedArguments(ArgumentsGrammar):
    """`<KEY>VALUE</KEY>` for each argument, where a value is a text or has elements itself. An argument is emitted at its end.

    Attributes:
        prefix: what stands before each tag, and in no value.
        call_end: the tag after the last argument.
    """

    prefix: str
    call_end: str

    @cached_property
    def _opening(self) -> regex.Pattern[str]:
        return regex.compile(rf"\s*{regex.escape(self.prefix)}<(?P<key>[^<>/]{{1,256}})>")

    @cached_property
    def _closing(self) -> regex.Pattern[str]:
        return regex.compile(rf"\s*{regex.escape(self.prefix)}</[^<>]{{1,256}}>")

    @cached_property
    def _end(self) -> regex.Pattern[str]:
        return regex.compile(rf"\s*{regex.escape(self.call_end)}")

    def read(self, state: Parsing, name: str) -> Steps[bool]:
        source, parameters = state.source, Parameters(state.tools.get(name))
        is_empty = (yield from source.match(self._end)) is not None
        if not is_empty and (yield from source.match(self._opening)) is None:
            return False
        if not state.may_call(name, is_whole=True):
            return False
        state.begin(name)
        separator = "{"
        while (element := (yield from source.accept(self._opening))) is not None:
            key = element["key"].strip()
            value = yield from self._read_element(state, parameters, key, 0)
            if value is None:
                return True  # it was cut off
            state.output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "
        if (yield from source.match(self._end)) is None:
            return True
        state.output.arguments("}" if separator == ", " else "{}")
        state.is_open = False
        return True

    def _read_element(self, state: Parsing, parameters: Parameters, key: str, depth: int) -> Steps[str | None]:
        """Read an element after its opening tag, and its closing tag; returns its value as JSON, None if it is not whole."""
        source, own = state.source, parameters.child(key)
        text: list[str] = []
        children: list[tuple[str, str]] = []
        while (yield from source.read_until(text.append, self.prefix)):
            if (yield from source.accept(self._closing)) is not None:
                return _json(parameters, own, key, "".join(text), children)
            child = yield from source.accept(self._opening)
            if child is None or depth == _MAX_DEPTH:
                return None
            name = child["key"].strip()
            scope = Parameters({"properties": {_ITEM: own.items}}, own.root) if name == _ITEM else own
            value = yield from self._read_element(state, scope, name, depth + 1)
            if value is None:
                return None
            children.append((name, value))
        return None


def _json(parameters: Parameters, own: Parameters, key: str, text: str, children: list[tuple[str, str]]) -> str:
    if children and all(name == _ITEM for name, _ in children) and _ITEM not in own:
        return f"[{', '.join(value for _, value in children)}]"
    if children:
        groups: dict[str, list[str]] = {}
        for name, value in children:
            groups.setdefault(name, []).append(value)
        joined = {name: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for name, values in groups.items()}
        return (
            "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in joined.items()) + "}"
        )
    value: Any = parameters.value(key, text)
    if value == "" and own.types:
        value = {"array": [], "object": {}}.get(own.types[0], "")
    return json.dumps(value, ensure_ascii=False)
