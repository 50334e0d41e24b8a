"""Eager execution with boundary ops passed to a handler, for models that cannot or should not be compiled.

A dispatch mode intercepts the boundary ops, so CUDA graphs are recorded piecewise without a captured graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.compiler.partition.split import boundary_op, normalize_call
from torchweave.compiler.runtime.forward import BoundaryHandler


class _BoundaryDispatchMode(TorchDispatchMode):
    def __init__(self, boundary: BoundaryHandler, names: frozenset[str]) -> None:
        super().__init__()
        self.boundary, self.names = boundary, names

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op = boundary_op(func, self.names)
        if op is None:
            return func(*args, **(kwargs or {}))
        return self.boundary(op, *normalize_call(op, args, kwargs or {}))


class EagerForward:
    """Runs the module's own forward without gradients: `eager_forward(boundary, *inputs)`."""

    def __init__(self, module: nn.Module, boundary_ops: Iterable[str]) -> None:
        self.module = module
        self.boundary_ops = frozenset(boundary_ops)

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Any:
        with torch.no_grad(), _BoundaryDispatchMode(boundary, self.boundary_ops):
            return self.module(*inputs)


def eager_forward(module: nn.Module, boundary_ops: Iterable[str]) -> EagerForward:
    """A forward without the compiler; see `EagerForward`."""
    return EagerForward(module, boundary_ops)
