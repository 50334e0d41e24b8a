"""Guards of forward's own branches that torch does not record.

    y = x.t().contiguous()          # torch's guard: x.shape[0] != 1, which selects the general path and is ignored
    if x.shape[0] == 1: ...         # known by that guard: no second one is recorded
    if y.t().is_contiguous(): ...   # computed from symbolic strides, for sizes above 1, without a guard

A guard of a branch excludes a size, one of an operation does not (`size_ranges`): each branch needs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor

from torchweave.compiler.ir.symbols import expression


@contextmanager
def record_branches() -> Iterator[None]:
    """Add a guard to the shape environment for each branch on sizes, and each `is_contiguous()`, that Dynamo traces."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    evaluate: Any = SymNodeVariable.evaluate_expr
    is_contiguous: Any = TensorVariable.method_is_contiguous

    def evaluate_expr(self: Any, *args: Any) -> Any:
        if not isinstance(self.sym_num, torch.SymBool):
            return evaluate(self, *args)
        condition, guards = self.sym_num.node.expr, self.sym_num.node.shape_env.guards
        known = len(guards)
        answer = evaluate(self, *args)
        if len(guards) == known:
            _add_guard(self.sym_num.node.shape_env, condition if answer else sympy.Not(condition))
        return answer

    def method_is_contiguous(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = is_contiguous(self, *args, **kwargs)
        fake = self.proxy.node.meta.get("example_value")
        of_another_format = any(isinstance(each, VariableTracker) for each in (*args, *kwargs.values()))
        if not of_another_format and isinstance(fake, Tensor) and answer is not None:
            _guard_contiguity(fake, answer.as_python_constant())
        return answer

    with (
        mock.patch.object(SymNodeVariable, "evaluate_expr", evaluate_expr),
        replace_tensor_method("is_contiguous", method_is_contiguous),
    ):
        yield


@contextmanager
def replace_tensor_method(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let Dynamo trace a method of tensors by `function(variable, translator, *args, **kwargs)`.

    From torch 2.14 on calls read the functions from a table, beside the attributes of its class.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    entry = getattr(TensorVariable, "tp_methods", {}).get(name)
    with (
        mock.patch.object(TensorVariable, f"method_{name}", function),
        nullcontext() if entry is None else mock.patch.object(entry, "handler", function),
    ):
        yield


def _add_guard(shape_env: Any, guard: Any) -> None:
    from torch._guards import ShapeGuard

    if getattr(guard, "free_symbols", None):
        shape_env.guards.append(ShapeGuard(guard, shape_env._get_sloc(), size_oblivious=False))


def _guard_contiguity(fake: Tensor, is_contiguous: bool) -> None:
    nodes = [size.node for size in (*fake.shape, *fake.stride()) if isinstance(size, torch.SymInt)]
    for symbol in {symbol for node in nodes for symbol in node.expr.free_symbols}:
        sizes, strides = (
            [sympy.sympify(expression(each)).xreplace({symbol: sympy.Integer(1)}) for each in geometry]
            for geometry in (fake.shape, fake.stride())
        )
        if _is_contiguous(sizes, strides) != is_contiguous:
            _add_guard(nodes[0].shape_env, sympy.Ne(symbol, 1))


def _is_contiguous(sizes: list[Any], strides: list[Any]) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if sympy.expand(stride - expected) != 0:
                return False
            expected *= size
    return True
