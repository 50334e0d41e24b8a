"""Ids of calls, in the form that a model's template takes when the conversation goes on."""

from __future__ import annotations

import uuid
from collections.abc import Callable


def call_ids(form: str = "call", num_earlier: int = 0) -> Callable[[str, int], str]:
    """Return what creates the id of a call from its name and its index in the answer.

    Args:
        form: `call`: a random id; `nine`: of nine letters and digits, as Mistral's templates require; `counted`:
            `functions.NAME:NUMBER`, counted over the conversation, as Kimi's templates write it into the prompt.
        num_earlier: calls in the conversation so far.
    """
    if form == "nine":
        return lambda name, index: uuid.uuid4().hex[:9]
    if form == "counted":
        return lambda name, index: f"functions.{name}:{num_earlier + index}"
    return lambda name, index: f"call_{uuid.uuid4().hex[:24]}"
