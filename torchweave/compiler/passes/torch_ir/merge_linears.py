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

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torchweave.compiler.ir.graph import CapturedGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, Mismatch, NearMiss, PassResult
from torchweave.compiler.passes.torch_ir.stacking import StackableCall, merge_groups, mergeable_groups

LINEAR = torch.nn.functional.linear  # the builtin that tracing records

_ACTIVATIONS = (F.silu, F.gelu, F.relu, torch.relu, torch.sigmoid)
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
        if (why := unsupported_weight(graph, weight, bias)) is not None:
            near_misses.append(NearMiss(node.name, why))
            continue
        fake = value(weight)
        kind = (bias is not None, fake.dtype, fake.device)
        constants = (weight,) if bias is None else (weight, bias)
        call = StackableCall(node, x, constants, (x, weight, bias), -fake.shape[0] % _ALIGNED)
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


def unsupported_weight(graph: CapturedGraph, weight: Any, bias: Any) -> str | None:
    """Why the weight of a linear is not a plain matrix of the module, or its bias not a tensor of it, or None."""
    tensor = graph.constant(weight)
    if tensor is None or (bias is not None and graph.constant(bias) is None):
        return "its weight or bias is computed, not a parameter"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"its weight is a {type(tensor).__name__}"
    return None if tensor.ndim == 2 else f"its weight has {tensor.ndim} dimensions"


def _mergeable_by_node(
    graph: CapturedGraph, group: Sequence[StackableCall], near_misses: list[NearMiss]
) -> Iterator[list[StackableCall]]:
    """Groups of linears that read one node and have aligned rows, then of those that are left. A gate and up that the passes
    after fuse with their activation so stay apart from a router."""
    by_node: dict[fx.Node, list[StackableCall]] = {}
    for item in group:
        if not item.padding:
            by_node.setdefault(item.x, []).append(item)
    groups = [items for items in by_node.values() if len(items) > 1]
    left = [item for item in group if not any(item in items for items in groups)]
    if len(left) == 1 and left[0].padding:
        rows = value(left[0].constants[0]).shape[0]
        near_misses.append(NearMiss(left[0].node.name, f"its {rows} rows would misalign the rows after it"))
    for items in groups:
        yield from map(_gate_first, mergeable_groups(graph, items, near_misses))
    yield from mergeable_groups(graph, left, near_misses)


def _gate_first(items: list[StackableCall]) -> list[StackableCall]:
    """The order in which a gated activation reads two halves: `up(x) * act(gate(x))` calls up first."""
    if len(items) != 2 or not _is_activated(items[1].node) or _is_activated(items[0].node):
        return items
    return items[::-1]


def _is_activated(node: fx.Node) -> bool:
    """Whether the one reader of a result, or of its multiple by a number, is an activation."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    is_scaled = user.target is operator.mul and any(isinstance(each, (int, float)) for each in user.args)
    return user.target in _ACTIVATIONS or (is_scaled and _is_activated(user))


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
