"""Suggestions for unknown names in error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_CLOSE = 0.85
"""Of two names without their separators: they are the same name with a slip in it."""
_WORDS_CLOSE = 0.7
"""Of two words: one is the other, misspelt."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """End of an error about an unknown name: a suggestion from `known`, after `prefix`; `otherwise` if none is close."""
    near = [each for each in difflib.get_close_matches(name, list(known)) if _is_close(name, each)]
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


def _is_close(name: str, known: str) -> bool:
    """Whether `name` means `known`, and does not merely share words with it, as `prompt_token_ids` and `stop_token_ids` do."""
    words, others = _words(name), _words(known)
    if _ratio("".join(words), "".join(others)) >= _CLOSE:
        return True
    others = [other for other in others if other not in words]
    return all(word in known or any(_ratio(word, other) >= _WORDS_CLOSE for other in others) for word in words)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
