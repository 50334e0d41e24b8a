"""Regular expressions that end an answer, matched byte by byte in linear time by llguidance's automata.

Python's `re` needs exponential time for some expressions, and requests bring theirs.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_GRAMMAR_LINES = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_MISSING = "stop_regex requires the package llguidance; install torchweave[structured]."
_NUM_BYTES = 256
_CACHED_PATTERNS = 64


class _Bytes:
    """A tokenizer of single bytes, as llguidance takes it."""

    eos_token_id = _NUM_BYTES
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_NUM_BYTES)), b"<end>")
    special_token_ids = (_NUM_BYTES,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))  # type: ignore[arg-type]


@functools.lru_cache(_CACHED_PATTERNS)
def _compiled(pattern: str) -> Any:
    """llguidance's matcher of a pattern at the beginning of a text, which is copied for each answer: compiling takes 10 ms.

    Raises:
        ValueError: see `RegexMatcher`.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError(_MISSING)
    from llguidance import LLMatcher

    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_regex(f"(?s:.*)(?:{pattern})"))
    if matcher.is_error():
        reason = one_line_reason(matcher.get_error())[:200]
        raise ValueError(f"stop_regex cannot be {pattern[:200]!r}: {reason}.")
    if matcher.is_accepting():
        raise ValueError(f"stop_regex must not match the empty text, as {pattern[:200]!r} does.")
    return matcher


def one_line_reason(error: str, with_place: bool = False) -> str:
    """An error of llguidance without its listing of the grammar, of which it makes expressions a part.

    Args:
        with_place: name the line and the column, where the grammar is the user's own.
    """
    place = _PLACE.match(error)
    found = re.search(r"^error: (.+)$", error, re.MULTILINE)  # of a regular expression, behind its own listing
    reason = found[1] if found else _GRAMMAR_LINES.sub("", error[place.end() if place else 0 :])
    reason = " ".join(reason.split()).rstrip(".")
    return f"line {place[1]}, column {place[2]}: {reason}" if place and with_place else reason


class RegexMatcher:
    """Finds the first place where a text, read in parts, has matched a regular expression.

    Args:
        pattern: in the syntax of Rust's `regex`: without look-around and back-references.

    Raises:
        ValueError: the pattern is invalid, or llguidance is not installed.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._matcher = _compiled(pattern).deep_copy()

    def find(self, text: str) -> int | None:
        """Read text; returns the number of its characters up to the end of the first match, None without one.

        Raises:
            ValueError: the automaton of the pattern has become too large.
        """
        for count, char in enumerate(text, 1):
            for byte in char.encode("utf-8", "replace"):
                if not self._matcher.consume_token(byte):
                    raise ValueError(
                        f"stop_regex cannot be {self.pattern[:200]!r}, which needs too many states; simplify it."
                    )
            if self._matcher.is_accepting():
                return count
        return None
