"""Answers that a checkpoint's own `response_template` describes: transformers' parser, behind the interface of a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import regex

from torchweave.serving.openai.tools.source import Output, Source, Steps
from torchweave.serving.openai.tools.values import as_json

_REASONING = ("reasoning", "reasoning_content", "thinking")
_CALLS = "tool_calls"


class EventParser(Protocol):
    """transformers' `ResponseParser` (`transformers.utils.chat_parsing`, from version 5.24)."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns events of regions: `region_open`, `region_chunk` and `region_close`."""
        ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """End the text; returns the message and the last events."""
        ...


def as_lenient(template: dict[str, Any]) -> dict[str, Any]:
    """A response template none of whose fields is required, and whose JSON may be wrong: an answer may be cut off anywhere."""
    return {**template, "fields": {name: _lenient(field) for name, field in template.get("fields", {}).items()}}


def _lenient(field: dict[str, Any]) -> dict[str, Any]:
    field = {**field, "optional": True}
    if field.get("content") == "json":
        field["content_args"] = {**field.get("content_args", {}), "allow_non_json": True}
    return field


def start_anchor(template: dict[str, Any]) -> regex.Pattern[str] | None:
    """Pattern of what begins a message of the assistant in a response template."""
    literals = template.get("start_anchor")
    if literals is not None:
        return regex.compile("|".join(map(regex.escape, [literals] if isinstance(literals, str) else literals)))
    pattern = template.get("start_anchor_pattern")
    return None if pattern is None else regex.compile(pattern, regex.DOTALL)


@dataclass(frozen=True)
class TemplateGrammar:
    """An answer in regions: reasoning, calls, and text, which every other field is.

    A call is emitted when its region closes. What transformers cannot read is text.

    Attributes:
        make: creates the parser of one answer after a prompt.
        prefix: end of the prompt.
        with_calls: the request has tools; else calls are text.
        anchor: pattern of what begins a message of the assistant; None: unknown.
    """

    make: Callable[[str], EventParser]
    prefix: str
    with_calls: bool
    anchor: regex.Pattern[str] | None = None

    def begins_in(self, prefix: str) -> bool:
        """Whether the answer's message begins in the end of a prompt."""
        return self.anchor is not None and self.anchor.search(prefix) is not None

    def parse(self, source: Source, output: Output) -> Steps[None]:
        """Parse an answer."""
        state = _State(self, output)
        yield from source.read_until(state.feed)
        state.finish()


class _State:
    """The parser of one answer, and the region that is open."""

    def __init__(self, grammar: TemplateGrammar, output: Output) -> None:
        self._grammar, self._output = grammar, output
        self._parser = grammar.make(grammar.prefix)
        self._field = ""
        self._space = ""  # held back: the region may end
        self._begun: set[str] = set()  # fields that have text
        self._raw: list[str] = []  # of a region of calls

    def feed(self, text: str) -> None:
        """Add text of the answer."""
        self._take(lambda: self._parser.feed(text), text)

    def finish(self) -> None:
        """End the answer."""
        self._take(lambda: self._parser.finalize()[1], "")

    def _take(self, step: Callable[[], list[dict[str, Any]]], text: str) -> None:
        """Write the events of a step. A region that cannot be read becomes text, and another parser goes on after it."""
        try:
            events = step()
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            self._output.text("".join(self._raw) + text)
            self._raw, self._parser, self._field = [], self._grammar.make(""), ""
            return
        for event in events:
            self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        field, kind = str(event.get("field")), event.get("type")
        if field != self._field:
            self._field, self._space = field, ""
        if kind == "region_chunk" and field == _CALLS and self._grammar.with_calls:
            self._raw.append(event["text"])
        elif kind == "region_chunk":
            self._write_text(event["text"])
        elif kind == "region_close":
            raw, self._raw = "".join(self._raw), []
            self._field = ""
            if field == _CALLS and self._grammar.with_calls:
                self._write_calls(event.get("value"), raw)

    def _write_text(self, text: str) -> None:
        """Write text of a region without the white space around it."""
        text = self._space + (text if self._field in self._begun else text.lstrip())
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._begun.add(self._field)
            (self._output.reasoning if self._field in _REASONING else self._output.text)(stripped)

    def _write_calls(self, value: Any, raw: str) -> None:
        calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            self._output.text(raw)
            return
        for name, arguments in (call for call in calls if call is not None):
            self._output.call(name)
            self._output.arguments(arguments)


def _call(value: Any) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a call in OpenAI's form; None if it is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        return None
    arguments = function.get("arguments", function.get("parameters"))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    written = as_json(text or "{}")
    return (name, written) if written is not None and written.startswith("{") else None


def with_prompt(
    grammar: TemplateGrammar, ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> TemplateGrammar:
    """The grammar of answers to a prompt. Its end is read as far back as the answer's message begins."""
    size = 64
    while size < len(ids):
        prefix = decode(ids[-size:])
        if grammar.begins_in(prefix):
            return replace(grammar, prefix=prefix)
        size *= 8
    return replace(grammar, prefix=decode(ids))
