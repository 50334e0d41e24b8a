"""What every stage of the stack agrees on: a forward is a function of tensors and of who carries out boundary ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

BoundaryHandler = Callable[[Any, tuple, dict], None]
"""Carries out a boundary op: `boundary(op, args, kwargs)`. Positional arguments are complete, defaults filled in."""


class Forward(Protocol):
    """A step of a model: woven, or run as it is."""

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Any: ...


def call_op(op: Any, args: tuple, kwargs: dict) -> None:
    """The boundary of a module without an engine: the op does what it does by itself."""
    op(*args, **kwargs)
