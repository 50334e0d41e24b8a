"""A forward: a function of a boundary handler and of input tensors, compiled or eager.

Eager execution is for models that cannot or should not be compiled. A dispatch mode passes the boundary ops to the handler, so
that CUDA graphs are recorded piecewise without a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.compiler.partition.split import boundary_op, normalize_call

BoundaryHandler = Callable[[Any, tuple, dict], None]
"""Runs a boundary op: `boundary(op, args, kwargs)`, with all positional arguments and defaults filled in."""


class Forward(Protocol):
    """One step of a model, compiled or eager."""

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Any: ...


def call_op(op: Any, args: tuple, kwargs: dict) -> None:
    """Boundary handler without an engine: call the op."""
    op(*args, **kwargs)


class _BoundaryDispatchMode(TorchDispatchMode):
    def __init__(self, boundary: BoundaryHandler, names: frozenset[str]) -> None:
        super().__init__()
        self.boundary, self.names = boundary, names

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op = boundary_op(func, self.names)
        if op is None:
            return func(*args, **(kwargs or {}))
        return self.boundary(op, *normalize_call(op, args, kwargs or {}))


def eager_forward(module: nn.Module, boundary_ops: Iterable[str]) -> Forward:
    """The module's own forward, without the compiler and without gradients."""
    names = frozenset(boundary_ops)

    def forward(boundary: BoundaryHandler, *inputs: Tensor) -> Any:
        with torch.no_grad(), _BoundaryDispatchMode(boundary, names):
            return module(*inputs)

    return forward
