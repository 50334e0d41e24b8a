"""Linears that read the same tensor become one: q/k/v, gate/up, and whatever else a model has.

Before                                  After
    q = linear(x, Wq)                       y = linear(x, W)              W = [Wq; Wk; Wv]
    k = linear(x, Wk)                       q, k, v = split(y, [...], -1)
    v = linear(x, Wv)

When      weights (and biases) are parameters of one dtype and a multiple of 8 rows, all have a bias or none has, nothing
          writes to x between the calls, no boundary op lies between them, and every reader of q, k, v takes a strided view.
Numerics  exact: each output element is the same dot product (a BLAS may choose another order of summation).
Memory    none: the module's parameters become views of the merged weight.
Pays      at every token count: one matmul reads x once and fills the device better than three.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchweave.compile.graph import CapturedGraph, refresh
from torchweave.compile.mutation import storage, written
from torchweave.compile.passes.base import GraphPass, Mismatch, NearMiss, PassResult
from torchweave.compile.split import boundary_op
from torchweave.compile.symbols import value

LINEAR = torch.nn.functional.linear  # the builtin itself, which is what tracing records

_ALIGNED = 8  # rows of a weight, columns of the result: 16 bytes of bfloat16, what fast matmuls want


@dataclass(frozen=True)
class _Linear:
    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


class MergeLinears(GraphPass):
    """See the module's text."""

    name = "merge_linears"

    def run(self, graph: CapturedGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        merged: dict[tuple[fx.Node, ...], tuple[fx.Node, fx.Node | None]] = {}
        matches = rewritten = 0
        for group in _groups(graph, near_misses):
            faked, why = None, _refusal(group, merged)
            if why is None:
                try:
                    faked = _fake_outputs(graph, group)
                except Exception as error:  # whatever a reader raises when it cannot take a strided view
                    why = f"a reader needs a contiguous result ({str(error).splitlines()[0]})"
            if faked is None:
                near_misses.append(NearMiss(", ".join(item.node.name for item in group), str(why)))
                continue
            _rewrite(graph, group, merged, faked)
            matches += 1
            rewritten += len(group)
        graph.drop_unused_constants()
        return PassResult(matches, rewritten, tuple(near_misses))


def _groups(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[list[_Linear]]:
    """Linears over parameters that read one tensor and agree in kind, two or more, in the graph's order."""
    by_input: dict[fx.Node, dict[_Kind, list[_Linear]]] = {}
    for node, x, weight, bias in _linears(graph, near_misses):
        tensor = graph.constant(weight)
        if tensor is None or (bias is not None and graph.constant(bias) is None):
            near_misses.append(NearMiss(node.name, "its weight or bias is computed, not a parameter"))
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            near_misses.append(NearMiss(node.name, f"its weight is a {type(tensor).__name__}"))
            continue
        if tensor.ndim != 2 or tensor.shape[0] % _ALIGNED:
            near_misses.append(NearMiss(node.name, f"its {tensor.shape[0]} rows would misalign those behind it"))
            continue
        kind = _Kind(bias is not None, tensor.dtype, tensor.device)
        by_input.setdefault(x, {}).setdefault(kind, []).append(_Linear(node, x, weight, bias))
    for x, kinds in by_input.items():
        most = max(kinds.values(), key=len)
        for group in kinds.values():
            if group is not most:
                beside = ", ".join(item.node.name for item in most)
                near_misses.append(
                    NearMiss(group[0].node.name, f"reads {x.name} like {beside}, but differs in bias or dtype")
                )
            yield from _stretches(graph, group, near_misses)


@dataclass(frozen=True)
class _Kind:
    has_bias: bool
    dtype: torch.dtype
    device: torch.device


def _linears(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[tuple[fx.Node, Any, Any, Any]]:
    """Every linear that reads what another one reads, with its arguments."""
    found: list[tuple[fx.Node, Any, Any, Any]] = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is LINEAR:
            try:
                found.append((node, *GraphPass.bind(node, "input", "weight", bias=None)))
            except Mismatch as mismatch:
                near_misses.append(NearMiss(node.name, str(mismatch)))
    readers = Counter(x for _, x, _, _ in found)
    yield from (each for each in found if readers[each[1]] > 1)


def _stretches(graph: CapturedGraph, group: list[_Linear], near_misses: list[NearMiss]) -> Iterator[list[_Linear]]:
    """The group, divided where a boundary op or a write to what they read lies between two of them."""
    stretch = group[:1]
    for last, item in pairwise(group):
        barrier = _barrier(graph, last.node, item.node, storage(item.x))
        if barrier is not None:
            near_misses.append(NearMiss(item.node.name, f"reads {item.x.name} like {last.node.name}, but {barrier}"))
            if len(stretch) > 1:
                yield stretch
            stretch = []
        stretch.append(item)
    if len(stretch) > 1:
        yield stretch


def _barrier(graph: CapturedGraph, node: fx.Node, last: fx.Node, read: int | None) -> str | None:
    """What keeps a call at `last` from moving up to `node`, or None."""
    while node is not last:
        node = node.next
        if node.op == "call_function" and boundary_op(node.target, graph.boundary_ops) is not None:
            return f"the boundary op {node.name} lies between them"
        if any(storage(argument) == read for argument in written(node)):
            return f"{node.name} writes to it between them"
    return None


def _refusal(group: list[_Linear], merged: dict) -> str | None:
    """Why a group cannot be merged, whatever its readers take, or None."""
    key = tuple(item.weight for item in group)
    parts = {weight for known in merged for weight in known}
    if key not in merged and (len(set(key)) < len(key) or parts & set(key)):
        return "a weight is already part of another merged weight"
    return None


class _Faked(NamedTuple):
    """Fake values of a merged linear, its parts, and every node downstream whose geometry changes with them."""

    whole: Any
    parts: tuple[Any, ...]
    changed: dict[fx.Node, Any]


def _fake_outputs(graph: CapturedGraph, group: list[_Linear]) -> _Faked:
    """What merging would change; raises what a reader raises that cannot take it."""
    sizes = [value(item.weight).shape[0] for item in group]
    with graph.faking():
        weight = torch.cat([value(item.weight) for item in group])
        bias = (
            None if group[0].bias is None else torch.cat([value(item.bias) for item in group if item.bias is not None])
        )
        whole = torch.nn.functional.linear(value(group[0].x), weight, bias)
        parts = torch.split(whole, sizes, dim=-1)
    changed = refresh(graph, {item.node: part for item, part in zip(group, parts, strict=True)}, commit=False)
    return _Faked(whole, parts, changed)


def _rewrite(graph: CapturedGraph, group: list[_Linear], merged: dict, faked: _Faked) -> None:
    key = tuple(item.weight for item in group)
    if key not in merged:
        biases = [item.bias for item in group if item.bias is not None]
        merged[key] = (
            _merge(graph, [item.weight for item in group], "merged_weight"),
            _merge(graph, biases, "merged_bias") if biases else None,
        )
    weight, bias = merged[key]
    whole, parts, changed = faked
    for node, new in changed.items():
        node.meta["example_value"] = new
    sizes = [part.shape[-1] for part in parts]
    nodes = graph.graph
    with nodes.inserting_before(group[0].node):
        one = nodes.call_function(LINEAR, (group[0].x, weight, bias))
        pieces = nodes.call_function(torch.split, (one, sizes), {"dim": -1})
        items = [nodes.call_function(operator.getitem, (pieces, index)) for index in range(len(group))]
    one.meta.update(example_value=whole, stack_trace=group[0].node.meta.get("stack_trace"))
    pieces.meta["example_value"] = parts
    for item, new, part in zip(group, items, parts, strict=True):
        new.meta["example_value"] = part
        item.node.replace_all_uses_with(new)
        nodes.erase_node(item.node)


def _merge(graph: CapturedGraph, nodes: list[fx.Node], name: str) -> fx.Node:
    """One tensor that holds all of them, of which they become views."""
    tensors = [graph.constant(node) for node in nodes]
    with torch.no_grad():
        whole = torch.cat([tensor for tensor in tensors if tensor is not None])
    start = 0
    for node, tensor in zip(nodes, tensors, strict=True):
        assert tensor is not None
        end = start + tensor.shape[0]
        graph.move(node, whole[start:end])
        start = end
    return graph.add_constant(f"{name}_{nodes[0].name}", whole)
