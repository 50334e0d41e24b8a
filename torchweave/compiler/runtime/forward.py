"""Interface of a forward: a function of a boundary handler and of input tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

BoundaryHandler = Callable[[Any, tuple, dict], None]
"""Runs a boundary op: `boundary(op, args, kwargs)`, with all positional arguments and defaults filled in."""


class Forward(Protocol):
    """One step of a model, compiled or eager."""

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Any: ...


def call_op(op: Any, args: tuple, kwargs: dict) -> None:
    """Boundary handler without an engine: call the op."""
    op(*args, **kwargs)
