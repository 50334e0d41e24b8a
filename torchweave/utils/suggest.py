"""Suggestions for unknown names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """End of an error about an unknown name: a suggestion from `known`, after `prefix`; `otherwise` if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise
