"""Arguments between tags, as in XML: the end of a value is the closing tag after which the call can go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import regex

from torchweave.serving.openai.tools.grammar import NAME, ArgumentsGrammar, Grammar, HeadedCall, Parsing
from torchweave.serving.openai.tools.schema_types import Parameters
from torchweave.serving.openai.tools.source import END, Steps
from torchweave.serving.openai.tools.values import PYTHON_QUOTES, ValueReader, as_json, escaped

_NO_MENTION = regex.compile(r"(?:^|\n[ \t]*|[^\s\"'`(])\Z")
"""How text ends before a tag that is no mention of the tag within a sentence."""
_TEXTS = ("true", "string")
_NO, _BEGINS_TO_END, _WITHIN, _ENDED, _OVER, _CERTAIN = range(6)
"""How certain it is that a closing tag ends a value: the call's end follows in part, whole (where the tag may close one within
the value or is not written as the format has it, or neither), or with what comes after the call."""
_TAIL = 64  # characters of a value that tell so


@dataclass(frozen=True)
class TaggedArguments(ArgumentsGrammar):
    """A tag with an argument's name, its value, and a closing tag, for each argument.

    A value may hold these tags itself. A closing tag ends it only where another argument or the call's end follows, and not where
    it closes a tag within the value. A value whose closing tag is missing ends at the next argument of the function. A call that
    seems to end while text follows has ended only if no later end fits better: that is known when the answer ends.

    Attributes:
        key: pattern of the tag with the argument's name, `key`, and maybe its `kind`: `true` or `string` for a text, others
            for JSON.
        opening: how that tag begins.
        closing: the tag after a value.
        call_end: the tag after the last argument; empty: the format has none.
        section_end: the tag after the last call.
        next_call: pattern of how another call begins.
        between: what stands between a closing tag and the next argument. An argument that the function does not have is one only
            behind it.
        own_lines: a value stands on lines of its own if it begins with a line break.
    """

    key: str
    opening: str
    closing: str
    call_end: str
    section_end: str
    next_call: str
    between: str = ""
    own_lines: bool = False

    @cached_property
    def _patterns(self) -> dict[str, regex.Pattern[str]]:
        closing, section_end = regex.escape(self.closing), regex.escape(self.section_end)
        call_end = f"(?:{regex.escape(self.call_end)})?" if self.call_end else ""
        over = rf"\s*(?:{section_end}\s*)?(?:{END}|{self.next_call})"
        ends = "|".join(regex.escape(tag) for tag in (self.call_end, self.section_end) if tag)
        return {
            "key": regex.compile(rf"\s*{self.key}"),
            "tag": regex.compile(self.key),
            "closed_by_key": regex.compile(rf"{closing}\s*{self.key}"),
            "closed_and_over": regex.compile(rf"{closing}\s*{call_end}{over}"),
            "closed_and_ended": regex.compile(rf"{closing}\s*(?:{ends})"),
            "closed_fully": regex.compile(rf"{closing}\s*{call_end}\s*{section_end}"),
            "over": regex.compile(rf"(?:{ends}){over}"),
            "end": regex.compile(rf"\s*{regex.escape(self.call_end)}"),
            "next_call": regex.compile(self.next_call),
            "no_arguments": regex.compile(rf"\s*(?:{ends}|{END}|{self.next_call})"),
        }

    def read(self, state: Parsing, name: str) -> Steps[bool]:
        source, parameters = state.source, Parameters(state.tools.get(name))
        given: list[str] = []
        if not (yield from self._begins(state, name)):
            return False
        state.begin(name)
        while (tag := (yield from source.accept(self._patterns["key"]))) is not None:
            given.append(tag["key"].strip())
            state.output.arguments(f"{'{' if len(given) == 1 else ', '}{json.dumps(given[-1], ensure_ascii=False)}: ")
            value = _Value(state.output.arguments, parameters, given[-1], tag.groupdict().get("kind"), self.own_lines)
            if not (yield from self._read_value(state, value, parameters, given)):
                return True  # it was cut off
            value.finish()
        ended = yield from source.accept(self._patterns["end"])
        over = None if ended else (yield from source.match(self._patterns["no_arguments"]))
        if over is not None and over[0].endswith(END) and source.is_cut:
            return True
        state.output.arguments("}" if given else "{}")
        state.is_open = False
        return True

    def _begins(self, state: Parsing, name: str) -> Steps[bool]:
        """Whether arguments, or the call's end, are next."""
        if (yield from state.source.match(self._patterns["key"])) is not None:
            return state.may_call(name, is_whole=True)
        end = yield from state.source.match(self._patterns["no_arguments"])
        is_ended = bool(self.call_end) and end is not None and end[0].strip() == self.call_end
        return end is not None and state.may_call(name, is_whole=is_ended)

    def _read_value(self, state: Parsing, value: _Value, parameters: Parameters, given: list[str]) -> Steps[bool]:
        """Read a value and its closing tag; returns whether it was whole."""
        source, depth = state.source, 0
        tags = [tag for tag in (self.opening, self.closing, self.call_end, self.section_end) if tag]
        while True:
            tag = yield from source.read_until(value.add, *tags)
            if not tag:
                return self._end_early(state, value)
            if tag == self.closing:
                certainty = yield from self._certainty(state, parameters, given, depth, value)
                if certainty == _CERTAIN:
                    value.confirm()
                    value.is_closed = bool(source.take(len(tag)))
                    return True
                if certainty > value.certainty and not self._has_next_call(value):
                    value.hold(certainty)
                depth = max(depth - 1, 0)
            elif tag == self.opening:
                opened = yield from source.match(self._patterns["tag"])
                if opened is not None and value.certainty == _NO and value.may_end:
                    key = opened["key"].strip()
                    if key in parameters and key not in given:
                        return True
                depth += opened is not None
            elif (
                depth == 0 and value.certainty == _NO and (yield from source.match(self._patterns["over"])) is not None
            ):
                value.confirm()
                return True
            value.add(source.take(len(tag)))

    def _certainty(
        self, state: Parsing, parameters: Parameters, given: list[str], depth: int, value: _Value
    ) -> Steps[int]:
        """How certain it is that the closing tag that is next ends the value."""
        source = state.source
        if value.is_whole is not None:
            return _CERTAIN if value.is_whole else _NO
        follows = yield from source.match(self._patterns["closed_by_key"])
        if follows is not None:
            return _CERTAIN if self._is_next(follows, parameters, given, depth, value) else _NO
        over = yield from source.match(self._patterns["closed_and_over"])
        if over is not None and (depth == 0 or (over[0].endswith(END) and not self._has_next_call(value))):
            return _CERTAIN
        if over is not None:
            return _OVER
        if (yield from source.match(self._patterns["closed_and_ended"])) is None:
            return _NO
        if depth == 0 and state.trusts_ends:
            return _CERTAIN
        fully = yield from source.match(self._patterns["closed_fully"])
        if fully is None:
            return _BEGINS_TO_END
        as_written = value.is_on_own_line and self.call_end in fully[0]
        return _ENDED if depth == 0 and as_written else _WITHIN

    def _is_next(
        self, follows: regex.Match[str], parameters: Parameters, given: list[str], depth: int, value: _Value
    ) -> bool:
        """Whether the tag after a closing tag is that of the next argument."""
        key = follows["key"].strip()
        if key in given:
            return False
        if key in parameters:
            return depth == 0 or not self._has_next_call(value)
        as_written = follows[0].startswith(f"{self.closing}{self.between}{self.opening}") and value.is_on_own_line
        return depth == 0 and (as_written or not parameters.is_closed)

    def _has_next_call(self, value: _Value) -> bool:
        return value.certainty > _NO and value.held_has(self._patterns["next_call"])

    def _end_early(self, state: Parsing, value: _Value) -> bool:
        """End the value where it may have ended, as the answer has no better end."""
        rest = value.retract()
        if rest is None:
            return False
        state.trusts_ends = True
        state.source.put_back(rest)
        value.is_closed = bool(state.source.take(len(self.closing)))
        return True


class _Value:
    """A value that is read: a text is written as it comes, any other at its end.

    Attributes:
        certainty: how certain it is that the value has ended before what is held back.
        is_closed: it ended with its closing tag.
    """

    def __init__(
        self, write: Callable[[str], None], parameters: Parameters, key: str, kind: str | None, own_lines: bool
    ) -> None:
        self._write, self._parameters, self._key, self._kind = write, parameters, key, kind
        self._own_lines, self._is_first = own_lines, True
        self._is_text = kind in _TEXTS if kind is not None else parameters.is_text(key)
        self._parts: list[str] = []
        is_json = kind is not None or "string" not in (parameters.types_of(key) or ["string"])
        self._reader = ValueReader(lambda text: None, PYTHON_QUOTES) if is_json and not self._is_text else None
        self._line_break = ""  # held back: the closing tag may follow
        self._tail = self._unread = ""
        self._is_begun = False
        self._held: list[str] = []
        self.certainty, self.is_closed = _NO, False
        if self._is_text:
            write('"')

    def add(self, text: str) -> None:
        """Add text of the value."""
        if self.certainty > _NO:
            self._held.append(text)
            return
        self._tail = (self._tail + text)[-_TAIL:]
        if self._is_first:
            self._own_lines = self._own_lines and text.startswith("\n")
            text = text.removeprefix("\n") if self._own_lines else text
        text, self._is_first = self._line_break + text, False
        self._line_break = "\n" if text.endswith("\n") else ""
        self._add(text.removesuffix("\n"))

    def _add(self, text: str) -> None:
        if self._is_text:
            self._write(escaped(text))
        else:
            self._parts.append(text)
            self._check(text)

    def _check(self, text: str) -> None:
        """Follow an object or a list, whose end is known by itself."""
        reader = self._reader
        if reader is None:
            return
        text = self._unread + (text if self._is_begun else text.lstrip())
        self._is_begun = self._is_begun or bool(text)
        at = reader.read(text, 0)
        self._unread = text[at:]
        if reader.guessed or (self._is_begun and not reader.is_nested) or (reader.done and self._unread.strip()):
            self._reader = None

    @property
    def is_whole(self) -> bool | None:
        """Whether the object or list has ended; None if the value is neither, so that its tags tell its end."""
        return self._reader.done if self._reader is not None and self._is_begun else None

    @property
    def may_end(self) -> bool:
        """Whether a tag that is next does not look like a part of a sentence."""
        return _NO_MENTION.search(self._tail) is not None

    @property
    def is_on_own_line(self) -> bool:
        """Whether a tag that is next stands where the format has it."""
        return not self._own_lines or "".join(self._held[-1:] or [self._tail]).endswith("\n")

    def held_has(self, pattern: regex.Pattern[str]) -> bool:
        """Whether what is held back has a match of a pattern."""
        self._held = ["".join(self._held)]
        return pattern.search(self._held[0]) is not None

    def hold(self, certainty: int) -> None:
        """Add what was held back, and hold back what follows."""
        self.confirm()
        self.certainty = certainty

    def confirm(self) -> None:
        """Add what was held back."""
        held, self._held, self.certainty = self._held, [], _NO
        if held:
            self.add("".join(held))

    def retract(self) -> str | None:
        """Return what was held back, which is not part of the value; None if nothing was."""
        held, was_held = "".join(self._held), self.certainty > _NO
        self._held, self.certainty = [], _NO
        return held if was_held else None

    def finish(self) -> None:
        """Write the rest of the value."""
        if self.is_closed and not self._own_lines:
            self._add(self._line_break)
        if self._is_text:
            self._write('"')
            return
        text = "".join(self._parts)
        if self._kind is None:
            self._write(json.dumps(self._parameters.value(self._key, text), ensure_ascii=False))
        else:
            self._write(as_json(text) or json.dumps(text, ensure_ascii=False))


def function_grammar(section: str) -> Grammar:
    """`<SECTION><function=NAME><parameter=KEY>VALUE</parameter></function></SECTION>`, values on lines of their own."""
    arguments = TaggedArguments(
        key=r"<parameter=(?P<key>[^>\n]{1,256})>",
        opening="<parameter=",
        closing="</parameter>",
        call_end="</function>",
        section_end=f"</{section}>",
        next_call=rf"(?:<{section}>\s*)?<function=",
        between="\n",
        own_lines=True,
    )
    head = regex.compile(rf"<function=\s*{NAME}\s*>")
    return Grammar((HeadedCall(head, arguments),), opening=(f"<{section}>",), closing=(f"</{section}>",))


def invoke_grammar(openings: tuple[str, ...], section_end: str, prefix: str = "") -> Grammar:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section; `prefix` is a part of each tag.

    A parameter may tell whether its value is a text: `string="true"`.
    """
    begin = "|".join(map(regex.escape, openings))
    arguments = TaggedArguments(
        key=rf'<{prefix}parameter name="?(?P<key>[^">\n]{{1,256}})"?(?: string="(?P<kind>true|false)")?\s*>',
        opening=f"<{prefix}parameter",
        closing=f"</{prefix}parameter>",
        call_end=f"</{prefix}invoke>",
        section_end=section_end,
        next_call=rf"(?:(?:{begin})\s*)?<{prefix}invoke",
        between="\n",
    )
    head = regex.compile(rf'<{prefix}invoke name="?{NAME}"?\s*>')
    return Grammar((HeadedCall(head, arguments),), opening=openings, closing=(section_end,))


def key_value_arguments(
    prefix: str, call_end: str, section_end: str, next_call: str, suffix: str = ""
) -> TaggedArguments:
    """`<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`; `prefix` and `suffix` are parts of the tags' names."""
    key, value = f"{prefix}arg_key{suffix}", f"{prefix}arg_value{suffix}"
    return TaggedArguments(
        key=rf"<{key}>(?P<key>[^<]{{1,256}})</{key}>\s*<{value}>",
        opening=f"<{key}>",
        closing=f"</{value}>",
        call_end=call_end,
        section_end=section_end,
        next_call=next_call,
    )
