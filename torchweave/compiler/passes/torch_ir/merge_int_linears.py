"""Merge linears with weights in 4 or 8 bits that read the same tensor, such as q/k/v or gate/up, into one.

Before                                        After
    q = int_linear(x, Wq, Sq, Zq, order)          y = int_linear(x, W, S, Z, order)     W = [Wq; Wk], S = [Sq; Sk]
    k = int_linear(x, Wk, Sk, Zk, order)          q, k = split(y, [...], -1)

W8A8      int8_linear(x, W, S) is merged in the same way.
When      weights have one number of bits and group size, one order of inputs (the same values) or none, and are parameters; all
          calls have zero points or none has, and a bias or none has; no write to x and no boundary op lies between the calls;
          every reader of q, k takes a strided view.
Numerics  exact: each output element is the same dot product (a BLAS may sum in another order).
Memory    none: the module's parameters become views of the stacked weight.
Pays      at every token count: one product uses the device better than three.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import torchweave.ops.quant.int8_linear
import torchweave.ops.quant.int_linear  # noqa: F401  (defines torchweave::int_linear)
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes.base import GraphPass, NearMiss, PassResult
from torchweave.compiler.passes.torch_ir.stacking import StackableCall, merge_groups, mergeable_groups

_LINEAR = torch.ops.torchweave.int_linear.default
_INT8_LINEAR = torch.ops.torchweave.int8_linear.default


class MergeIntLinears(GraphPass):
    """See the module's text."""

    name = "merge_int_linears"

    def run(self, graph: CapturedGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        groups = itertools.chain(_groups(graph, near_misses), _int8_groups(graph, near_misses))
        matches, rewritten = merge_groups(graph, groups, near_misses)
        return PassResult(matches, rewritten, tuple(near_misses))


def _groups(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[list[StackableCall]]:
    """Groups of two or more products that read one tensor and agree in kind, in graph order."""
    by_kind: dict[tuple[Any, ...], list[StackableCall]] = {}
    calls = list(calls_of(graph, _LINEAR))
    orders: dict[fx.Node, list[fx.Node]] = {}  # by input: layers must not share constants, or their pieces would differ
    for node, (x, w, scale, zero, order, bias, group, *rest) in calls:
        if sum(other[0] is x for _, other in calls) < 2:
            continue
        row_scale = rest[0] if rest else None
        stacked = tuple(each for each in (w, scale, zero, bias, row_scale) if each is not None)
        if any(graph.constant(each) is None for each in (*stacked, *(() if order is None else (order,)))):
            near_misses.append(NearMiss(node.name, "its weight, scale or bias is computed, not a parameter"))
            continue
        same_order = None if order is None else _equal_constant(graph, order, orders.setdefault(x, []))
        optional = (zero is not None, bias is not None, row_scale is not None)
        kind = (x, value(w).dtype, value(scale).dtype, same_order, group, *optional)
        arguments = (x, w, scale, zero, same_order, bias, group, row_scale)
        by_kind.setdefault(kind, []).append(StackableCall(node, x, stacked, arguments))
    kinds = list(by_kind)
    for kind in kinds:
        if len(by_kind[kind]) == 1 and any(other[0] is kind[0] for other in kinds if other is not kind):
            why = f"reads {kind[0].name} like others, but differs in bits, groups, zero points, order of inputs or bias"
            near_misses.append(NearMiss(by_kind[kind][0].node.name, why))
        yield from mergeable_groups(graph, by_kind[kind], near_misses)


def _int8_groups(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[list[StackableCall]]:
    """The same of products with weights and activations in 8 bits."""
    by_kind: dict[tuple[Any, ...], list[StackableCall]] = {}
    for node, (x, w, scale, bias) in calls_of(graph, _INT8_LINEAR):
        stacked = (w, scale) if bias is None else (w, scale, bias)
        if all(graph.constant(each) is not None for each in stacked):
            kind = (x, value(scale).dtype, bias is None)
            by_kind.setdefault(kind, []).append(StackableCall(node, x, stacked, (x, w, scale, bias)))
    for calls in by_kind.values():
        yield from mergeable_groups(graph, calls, near_misses)


def _equal_constant(graph: CapturedGraph, node: fx.Node, known: list[fx.Node]) -> fx.Node:
    """The first of the known constants that equals this one; else this one, which is then known."""
    tensor = graph.constant(node)
    assert tensor is not None, "only constants are compared"
    for other in known:
        if other is node or torch.equal(tensor, graph.constant(other)):  # type: ignore[arg-type]
            return other
    known.append(node)
    return node
