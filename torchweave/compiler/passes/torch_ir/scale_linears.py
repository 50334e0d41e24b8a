"""Multiply by constants inside the linear whose input or output they scale.

Before                                  After
    y = torchweave.linear(x * c, W)         y = torchweave.linear(x, W, ..., c, m)
    z = y * m                               z = y

The columns may be a part, such as the keys of merged q/k/v, with views before the multiplication. Falcon-H1 multiplies what each
of its products reads or gives (muP), Granite each branch that it adds to the residual.

When      c is a number, m a parameter or buffer with a number for each column; nothing else reads the tensor that is multiplied; a
          linear takes one multiplication of its input and one of its output. A multiplication by 1 is removed.
Numerics  exact: the kernels round the product, then its multiple.
Pays      a launch each in a decode step, and what the launch kept apart: `fused_linears` puts a gate or a residual after it. A
          step of Falcon-H1 7B at batch 1 takes 6.02 ms on an H100 with this pass and `scan_gates`, 7.06 without.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.linear  # noqa: F401 (defines torchweave::linear)
from torchweave.compiler.ir.graph import CapturedGraph, same_geometry, update_fake_values
from torchweave.compiler.ir.mutation import storage_id
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, PassResult, near_misses_by_reason
from torchweave.compiler.passes.rewrite import erase
from torchweave.compiler.passes.torch_ir.stacking import find_barrier

_VIEWS = ("view", "reshape", "transpose", "unflatten", "contiguous")


@dataclass(frozen=True)
class _Factor:
    """A node that multiplies `source`, which holds the columns from `begin` to before `end` of a linear's result."""

    node: fx.Node
    source: fx.Node
    by: Any
    begin: int
    end: int


class ScaleLinears(GraphPass):
    """See the module's text."""

    name = "scale_linears"

    def run(self, graph: CapturedGraph) -> PassResult:
        matches, before = 0, graph.num_calls()
        rejected: dict[str, list[str]] = {}
        for node, arguments in self.calls(graph, torch.ops.torchweave.linear.default, "x", "w", bias=None, choices=""):
            x, input_factor = _factor_of_input(graph, arguments[0], node)
            scaling: tuple[Any, ...] = (None, 1.0)
            found = next(_factors_of_output(node, 0, value(node).shape[-1]), None)
            if found is not None:
                why = _remove(graph, found, node)
                if why is None:
                    matches += 1
                    scaling = _scaling(graph, found, node)
                else:
                    rejected.setdefault(why, []).append(found.node.name)
            is_scaled = input_factor != 1.0 or scaling != (None, 1.0)
            node.args = (x, *arguments[1:], *((input_factor, *scaling) if is_scaled else ()))
            if x is not arguments[0]:
                matches += 1
                erase(graph, [arguments[0]])
        return PassResult(matches, before - graph.num_calls(), near_misses_by_reason(rejected))


def _product(node: Any) -> tuple[Any, Any] | None:
    """The operands of a product that keeps the dtype and shape of the first, which is a tensor."""
    if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
        return None
    if node.target not in (operator.mul, torch.mul, "mul"):
        return None
    one, other = node.args
    if not isinstance(one, fx.Node) or (isinstance(other, fx.Node) and other.op != "placeholder"):
        one, other = other, one
    if not isinstance(one, fx.Node):
        return None
    x, y = value(one), value(node)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype != y.dtype or not x.dtype.is_floating_point:
        return None
    return (one, other) if list(map(str, x.shape)) == list(map(str, y.shape)) else None


def _factor_of_input(graph: CapturedGraph, x: Any, linear: fx.Node) -> tuple[Any, float]:
    """What the linear reads without its multiplication by a number, and the number."""
    product = _product(x)
    if (
        product is None
        or not isinstance(product[1], (int, float))
        or not same_geometry(value(product[0]), value(x), ones=False)
    ):
        return x, 1.0
    source, factor = product
    if find_barrier(graph, x, linear, storage_id(source)) is not None:
        return x, 1.0
    return (source, float(factor)) if factor == 1 or list(x.users) == [linear] else (x, 1.0)


def _factors_of_output(node: fx.Node, begin: int, end: int) -> Iterator[_Factor]:
    """Multiplications of a linear's columns, of all or of a part, which nothing else reads."""
    if len(node.users) != 1:
        return
    (user,) = node.users
    product = _product(user)
    if product is not None and product[0] is node:
        yield _Factor(user, node, product[1], begin, end)
    elif user.op == "call_method" and user.target in _VIEWS:
        yield from _factors_of_output(user, begin, end)
    elif user.target in (torch.split, "split") and node.target is torch.ops.torchweave.linear.default:
        parts = value(user)
        if any(part.shape[:-1] != value(node).shape[:-1] for part in parts):
            return
        for item in user.users:
            start = sum(part.shape[-1] for part in parts[: item.args[1]])
            yield from _factors_of_output(item, start, start + parts[item.args[1]].shape[-1])


def _remove(graph: CapturedGraph, found: _Factor, linear: fx.Node) -> str | None:
    """Let readers of a multiplication read its source; return the reason where they cannot, or where its constant is none."""
    if isinstance(found.by, fx.Node):
        factors = graph.constant(found.by)
        if factors is None:
            return "it is multiplied by a tensor that is not a parameter"
        if found.source is not linear or factors.numel() != factors.shape[-1] or not factors.is_contiguous():
            return "its factors are not one for each column"
        if factors.shape[-1] != found.end:
            return "its factors are not one for each column"
        if (why := find_barrier(graph, linear, found.node, storage_id(found.by))) is not None:
            return why
    elif not isinstance(found.by, (int, float)):
        return "it is multiplied by a number that is not constant"
    source = value(found.source)
    if not same_geometry(source, value(found.node)):
        output = graph.graph.output_node()
        if output in found.node.users:
            return "its result is returned, and its source has another layout"
        try:
            changed = update_fake_values(graph, {found.node: source}, commit=False)
        except Exception as error:  # readers that cannot take a strided view raise errors of any type
            return f"a reader needs a contiguous result ({str(error).splitlines()[0]})"
        for node, new in changed.items():
            node.meta["example_value"] = new
    found.node.replace_all_uses_with(found.source)
    erase(graph, [found.node])
    return None


def _scaling(graph: CapturedGraph, found: _Factor, linear: fx.Node) -> tuple[Any, ...]:
    """The op's arguments `factors`, `factor`, `begin` and `end`, without those that are defaults."""
    if not isinstance(found.by, fx.Node):
        whole = found.begin == 0 and found.end == value(linear).shape[-1]
        columns = () if whole or found.by == 1 else (found.begin, found.end)
        return None, float(found.by), *columns
    factors = found.by
    if value(factors).ndim > 1:
        with graph.graph.inserting_before(linear):
            factors = graph.call("view", factors, -1)
    return factors, 1.0
