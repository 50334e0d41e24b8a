"""Merge linears that read the same tensor, such as q/k/v or gate/up, into one.

Before                                  After
    q = linear(x, Wq)                       y = linear(x, W)              W = [Wq; Wk; Wv]
    k = linear(x, Wk)                       q, k, v = split(y, [...], -1)
    v = linear(x, Wv)

When      weights and biases are parameters of one dtype; all calls have a bias or none has; no write to x and no boundary op
          lies between the calls; every reader of q, k, v takes a strided view. One that forward returns is copied, so that its
          caller can view it. Weights whose rows are not a multiple of 8 (the gate of a shared expert has one row) are padded
          with zeros, and form a group of their own with linears that read x through a view, such as a router.
Numerics  exact: each output element is the same dot product (a BLAS may sum in another order).
Memory    the padding: the module's parameters become views of the merged weight.
Pays      at every token count: one matmul reads x once and uses the device better than three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.graph import CapturedGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, Mismatch, NearMiss, PassResult
from torchweave.compiler.passes.torch_ir.stacking import StackableCall, merge_groups, mergeable_groups

LINEAR = torch.nn.functional.linear  # the builtin that tracing records

_ALIGNED = 8  # rows of a weight, which are columns of the result: fast matmuls need 16-byte alignment, 8 bfloat16
_VIEWS = ("reshape", "view", "contiguous")


class MergeLinears(GraphPass):
    """See the module's text."""

    name = "merge_linears"

    def run(self, graph: CapturedGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        matches, rewritten = merge_groups(graph, _groups(graph, near_misses), near_misses)
        return PassResult(matches, rewritten, tuple(near_misses))


def _groups(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[list[StackableCall]]:
    """Groups of two or more linears over parameters that read one tensor and agree in kind, in graph order: first of those that
    read one node and have aligned rows, then of the others."""
    by_input: dict[fx.Node, dict[tuple[Any, ...], list[StackableCall]]] = {}
    for node, x, weight, bias in _linears(graph, near_misses):
        tensor = graph.constant(weight)
        if tensor is None or (bias is not None and graph.constant(bias) is None):
            near_misses.append(NearMiss(node.name, "its weight or bias is computed, not a parameter"))
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            near_misses.append(NearMiss(node.name, f"its weight is a {type(tensor).__name__}"))
            continue
        if tensor.ndim != 2:
            near_misses.append(NearMiss(node.name, f"its weight has {tensor.ndim} dimensions"))
            continue
        kind = (bias is not None, tensor.dtype, tensor.device)
        constants = (weight,) if bias is None else (weight, bias)
        call = StackableCall(node, x, constants, (x, weight, bias), -tensor.shape[0] % _ALIGNED)
        by_input.setdefault(_source(x), {}).setdefault(kind, []).append(call)
    for x, kinds in by_input.items():
        largest = max(kinds.values(), key=len)
        for group in kinds.values():
            if group is not largest:
                largest_names = ", ".join(item.node.name for item in largest)
                near_misses.append(
                    NearMiss(group[0].node.name, f"reads {x.name} like {largest_names}, but differs in bias or dtype")
                )
            yield from _mergeable_by_node(graph, group, near_misses)


def _mergeable_by_node(
    graph: CapturedGraph, group: Sequence[StackableCall], near_misses: list[NearMiss]
) -> Iterator[list[StackableCall]]:
    """Groups of linears that read one node and have aligned rows, then of those that are left. A gate and up that the passes
    behind fuse with their activation so stay apart from a router."""
    by_node: dict[fx.Node, list[StackableCall]] = {}
    for item in group:
        if not item.padding:
            by_node.setdefault(item.x, []).append(item)
    groups = [items for items in by_node.values() if len(items) > 1]
    left = [item for item in group if not any(item in items for items in groups)]
    if len(left) == 1 and left[0].padding:
        rows = value(left[0].constants[0]).shape[0]
        near_misses.append(NearMiss(left[0].node.name, f"its {rows} rows would misalign the rows behind it"))
    for items in (*groups, left):
        yield from mergeable_groups(graph, items, near_misses)


def _source(x: fx.Node) -> fx.Node:
    """The tensor that `x` views with the same shape and strides, as a reshape to its own shape does."""
    while x.op == "call_method" and x.target in _VIEWS:
        source = x.args[0]
        if not isinstance(source, fx.Node) or not same_geometry(value(x), value(source)):
            break
        x = source
    return x


def _linears(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[tuple[fx.Node, Any, Any, Any]]:
    """Linears, with their arguments, whose input another linear reads as well, through a view of the same shape or not."""
    linears: list[tuple[fx.Node, Any, Any, Any]] = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is LINEAR:
            try:
                linears.append((node, *GraphPass.bind(node, "input", "weight", bias=None)))
            except Mismatch as mismatch:
                near_misses.append(NearMiss(node.name, str(mismatch)))
    readers = Counter(_source(x) for _, x, _, _ in linears)
    yield from (each for each in linears if readers[_source(each[1])] > 1)
