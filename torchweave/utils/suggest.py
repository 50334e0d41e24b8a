"""What a name that nobody knows was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """The end of a sentence that refuses `name`: the nearest known one, behind `prefix`, or `otherwise` where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise
