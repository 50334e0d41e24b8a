"""Test a pass alone: build a graph with a symbolic token count from a function, run the pass, check the result.

def unfused(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor: ...

check(FUSION, unfused, [randn(T, 64), randn(T, 64), randn(64)], matches=1)
check(FUSION, nearly, [randn(T, 64), randn(T, 64), randn(64)], near_miss="also read by")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchweave.compiler.codegen.lower import as_piece, trace
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.partition.split import Piece
from torchweave.compiler.passes.base import Pass, PassResult
from torchweave.compiler.passes.manager import run_pass

T = 23
"""Token count of examples; every dimension of this size is symbolic in the graph."""

TOKENS = (1, 2, 7, 64)
"""Token counts at which rewritten graphs run."""


def graph_of(function: Callable[..., Any], examples: Sequence[Any]) -> Piece:
    """`function(*examples)` as a lowered piece; every dimension of size `T` is one symbol."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(tensor: Tensor) -> Tensor:
        dims = [DimDynamic.DUCK if size == T else DimDynamic.STATIC for size in tensor.shape]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))

    with dynamic_shapes_mode("backed_size_oblivious"):
        return as_piece(trace(function, [fake(item) if isinstance(item, Tensor) else item for item in examples]))


def check(
    each: Pass,
    function: Callable[..., Any],
    examples: Sequence[Tensor],
    *,
    matches: int | None = None,
    near_miss: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    opcheck: bool = True,
) -> PassResult:
    """Run a pass on the graph of a function and assert the properties that every pass must have.

    Args:
        examples: arguments of the function; dimensions of size `T` vary.
        matches: expected number of matches; default 0 with `near_miss`, else 1.
        near_miss: expected part of a near-miss reason.
        rtol, atol: tolerance of results against the function's own; bitwise equal by default.
        opcheck: run `torch.library.opcheck` on every custom op that the pass inserted.
    """
    graph = graph_of(function, examples)
    before = {node.target for node in graph.graph.nodes}
    with dynamic_shapes_mode("backed_size_oblivious"):
        result = run_pass(each, graph, debug=True)
    expected = (0 if near_miss is not None else 1) if matches is None else matches
    reasons = [f"{miss.node}: {miss.why}" for miss in result.near_misses]
    assert result.matches == expected, (
        f"{each.name} matched {result.matches} times, expected {expected}; {reasons}\n{graph.module.code}"
    )
    assert near_miss is None or any(near_miss in why for why in reasons), (
        f"no near-miss contains {near_miss!r}: {reasons}"
    )
    for tokens in TOKENS:
        _compare(graph, function, [_resized(item, tokens) for item in examples], rtol, atol)
    if opcheck:
        _opcheck(graph, before, [_resized(item, 7) for item in examples])
    return result


def _resized(item: Any, tokens: int) -> Any:
    """Copy an example with another token count; values come from the example, so that indices stay in range."""
    if not isinstance(item, Tensor) or T not in item.shape:
        return item
    for dim, size in enumerate(item.shape):
        if size == T:
            item = item.index_select(dim, torch.arange(tokens, device=item.device) % T)
    return item


def _compare(graph: Piece, function: Callable[..., Any], arguments: list[Any], rtol: float, atol: float) -> None:
    with torch.no_grad():
        expected = pytree.tree_leaves(function(*arguments))
        actual = graph.module(*arguments)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


class _OpCheck(fx.Interpreter):
    """Interpreter that runs `opcheck` once on each custom op, with the arguments of its first call."""

    def __init__(self, module: fx.GraphModule, known: set[Any]) -> None:
        super().__init__(module)
        self.known = known

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        custom = isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims", "prim")
        if custom and target not in self.known:
            self.known.add(target)
            torch.library.opcheck(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def _opcheck(graph: Piece, known: set[Any], arguments: list[Any]) -> None:
    with torch.no_grad():
        _OpCheck(graph.module, set(known)).run(*arguments)
