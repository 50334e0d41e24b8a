"""Values that models write: JSON or Python's literals are read incrementally and written as JSON that is always valid."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import regex

_WAITS = -1
"""A place that depends on text that has not arrived."""
_OPENING = {"{": "}", "[": "]", "(": "]"}
_CLOSING = {"}": "}", "]": "]", ")": "]"}
_SPACES = regex.compile(r"[ \t\r\n]+")
_WORD = regex.compile(r"[^\s,:{}\[\]()\"']+")
_WORD_BEFORE_MARKS = regex.compile(r"[^\s,:{}\[\]()\"'<]+")
_PLAIN = {quote: regex.compile(rf'[^{quote}"\\\x00-\x1f]+') for quote in "\"'"}
_NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HALF = regex.compile("[dD][89a-fA-F]..")
_PAIR = regex.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_ESCAPES = 'bfnrt"\\/'
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
JSON_QUOTES = ('"', "'")
PYTHON_QUOTES = ('"""', "'''", '"', "'")


class ValueReader:
    """Reads one value and writes it as JSON: what is valid JSON as it is, and what a model got wrong as the nearest that is.

    Python's words, quotes, tuples and numbers become JSON's; raw control characters are escaped, and numbers that JSON does not
    have (NaN, 1e400) become texts. Commas that are missing or surplus, brackets that do not match and words without quotes are
    mended, which `guessed` tells.

    Args:
        write: is given the JSON text in parts.
        quotes: what may enclose a text, the longest first. One that is no quote (`<escape>`) encloses it without escapes.
        bare_keys: keys of objects need no quotes.

    Attributes:
        done: the value has ended.
        guessed: the text was not a value.
    """

    def __init__(
        self, write: Callable[[str], None], quotes: tuple[str, ...] = JSON_QUOTES, bare_keys: bool = False
    ) -> None:
        self._write, self._quotes, self._bare_keys = write, quotes, bare_keys
        self._first_of_quotes = "".join(quote[0] for quote in quotes)
        self._word_pattern = _WORD if set(quotes) <= set(PYTHON_QUOTES) else _WORD_BEFORE_MARKS
        self._stack: list[str] = []  # closing brackets of the open ones
        self._state = "value"  # value, key, colon, or next: what is expected
        self._quote = ""  # of the current text
        self._word: list[str] | None = None  # parts of the current word or number
        self._comma = ""  # held back: a value may not follow
        self.done = self.guessed = self._was_nested = False

    def read(self, text: str, at: int) -> int:
        """Read on; returns the place up to which the text was read."""
        while not self.done and at < len(text):
            if self._quote:
                end = self._read_text(text, at)
            elif self._word is not None:
                end = self._read_word(text, at)
            else:
                end = self._read_between(text, at)
            if end == _WAITS:
                break
            at = end
        return at

    @property
    def is_nested(self) -> bool:
        """Whether the value is an object or a list, which is open or has ended."""
        return self._was_nested

    def finish(self) -> None:
        """End the text: a word or number has ended, too."""
        if self._word:
            self._end_word()

    # -- between texts and words ---------------------------------------------------------------------------------------

    def _read_between(self, text: str, at: int) -> int:
        space = _SPACES.match(text, at)
        if space is not None:
            if self._comma:
                self._comma += space[0]
            elif self._stack:
                self._write(space[0])
            return space.end()
        if text[at] not in self._first_of_quotes:
            return self._read_mark(text, at)
        rest = text[at : at + 16]
        if any(len(quote) > len(rest) and quote.startswith(rest) for quote in self._quotes):
            return _WAITS
        quote = next((quote for quote in self._quotes if rest.startswith(quote)), "")
        if not quote:
            return self._read_mark(text, at)
        self._begin()
        self._write('"')
        self._quote = quote
        return at + len(quote)

    def _read_mark(self, text: str, at: int) -> int:
        mark = text[at]
        if mark in _OPENING:
            self._open(mark)
        elif mark in _CLOSING:
            self._close(_CLOSING[mark])
        elif mark == ",":
            self._next()
        elif mark == ":" and self._state == "colon":
            self._write(":")
            self._state = "value"
        elif mark == ":":
            self.guessed = True
        else:
            self._begin()
            self._word = []
            return at
        return at + 1

    def _begin(self) -> None:
        """Begin a key or a value."""
        if self._state == "colon":
            self._write(": ")
            self._state, self.guessed = "value", True
        elif self._state == "next":
            self._next()
            self.guessed = True
        self._write(self._comma)
        self._comma = ""

    def _end(self) -> None:
        """End a key or a value."""
        self._state = "colon" if self._state == "key" else "next"
        self.done = not self._stack

    def _next(self) -> None:
        if self._state != "next":
            self.guessed = True
            return
        self._comma = ","
        self._state = "key" if self._stack[-1] == "}" else "value"

    def _open(self, mark: str) -> None:
        self._begin()
        if self._state == "key":
            self._write('"": ')
            self.guessed = True
        self._stack.append(_OPENING[mark])
        self._was_nested = True
        self._write("{" if mark == "{" else "[")
        self._state = "key" if mark == "{" else "value"

    def _close(self, mark: str) -> None:
        if mark not in self._stack:
            self.guessed = True
            self.done = not self._stack
            return
        while True:
            self._fill()
            closing = self._stack.pop()
            self._write(closing)
            self._state = "value"
            self._end()
            if closing == mark:
                return
            self.guessed = True

    def _fill(self) -> None:
        """Complete a key without a value."""
        is_missing = self._stack[-1] == "}" and self._state in ("colon", "value")
        if is_missing:
            self._write(": null" if self._state == "colon" else "null")
        self.guessed = self.guessed or is_missing
        self._comma = ""

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _read_text(self, text: str, at: int) -> int:
        if text.startswith(self._quote, at):
            end = at + len(self._quote)
            self._quote = ""
            self._write('"')
            self._end()
            return end
        if self._quote[0] not in _PLAIN:
            return self._read_verbatim(text, at)
        plain = _PLAIN[self._quote[0]].match(text, at)
        if plain is not None:
            self._write(plain[0])
            return plain.end()
        if self._quote.startswith(text[at : at + len(self._quote)]):
            return _WAITS
        if text[at] == "\\":
            return self._read_escape(text, at)
        self._write(escaped(text[at]))
        return at + 1

    def _read_verbatim(self, text: str, at: int) -> int:
        """Text up to the closing mark, or to what may be a part of it."""
        end = text.find(self._quote, at)
        if end < 0:
            sizes = range(min(len(self._quote) - 1, len(text) - at), 0, -1)
            end = len(text) - next((size for size in sizes if text.endswith(self._quote[:size])), 0)
        self._write(escaped(text[at:end]))
        return end if end > at else _WAITS

    def _read_escape(self, text: str, at: int) -> int:
        kind = text[at + 1 : at + 2]
        size = {"u": 4, "x": 2}.get(kind, 0)
        digits = text[at + 2 : at + 2 + size]
        if not kind or (len(digits) < size and _is_hex(digits)):
            return _WAITS
        if size and _is_hex(digits):
            if kind == "u" and _HALF.fullmatch(digits):
                return self._read_half(text, at)
            self._write(f"\\u{int(digits, 16):04x}" if kind == "x" else text[at : at + 6])
            return at + 2 + size
        if kind == "'":
            self._write("'")
            return at + 2
        is_valid = kind in _ESCAPES
        self._write(f"\\{kind}" if is_valid else "\\\\")
        return at + 2 if is_valid else at + 1

    def _read_half(self, text: str, at: int) -> int:
        """An escape of half a character beyond U+FFFF: with its other half, or as U+FFFD, since no UTF-8 holds a half."""
        pair = _PAIR.fullmatch(text, at, min(at + 12, len(text)), partial=True)
        if pair is not None and pair.partial:
            return _WAITS
        self._write("\\ufffd" if pair is None else pair[0])
        return at + (6 if pair is None else 12)

    # -- words and numbers ---------------------------------------------------------------------------------------------

    def _read_word(self, text: str, at: int) -> int:
        assert self._word is not None
        more = self._word_pattern.match(text, at)
        if more is None and self._word:
            self._end_word()
            return at
        self._word.append(more[0] if more is not None else text[at])  # a mark that begins nothing is a word
        return at + len(self._word[-1])

    def _end_word(self) -> None:
        word, self._word = "".join(self._word or ()), None
        if self._state == "key":
            self._write(json.dumps(word, ensure_ascii=False))
            self.guessed = self.guessed or not self._bare_keys
        else:
            self._write(self._scalar(word))
        self._end()

    def _scalar(self, word: str) -> str:
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        try:
            number = float(word)
        except ValueError:
            self.guessed = True
            return json.dumps(word, ensure_ascii=False)
        if not math.isfinite(number):
            return json.dumps(word)
        if _NUMBER.fullmatch(word):
            return word
        try:
            return str(int(word))
        except ValueError:
            return json.dumps(number)


def _is_hex(digits: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in digits)


def escaped(text: str) -> str:
    """Text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(text: str, quotes: tuple[str, ...] = PYTHON_QUOTES) -> str | None:
    """Convert the text of a value to JSON; None if it is not exactly one value."""
    parts: list[str] = []
    reader = ValueReader(parts.append, quotes)
    text = text.strip() + " "
    end = reader.read(text, 0)
    is_value = reader.done and not reader.guessed and not text[end:].strip()
    return "".join(parts) if is_value else None
