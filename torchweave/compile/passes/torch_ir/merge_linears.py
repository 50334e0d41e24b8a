"""Linears that read the same tensor become one: q/k/v, gate/up, and whatever else a model has.

Before                                  After
    q = linear(x, Wq)                       y = linear(x, W)              W = [Wq; Wk; Wv]
    k = linear(x, Wk)                       q, k, v = split(y, [...], -1)
    v = linear(x, Wv)

When      weights (and biases) are constants of one dtype, all have a bias or none has, nothing writes to x and no boundary
          op lies between the calls, and every reader of q, k, v takes a strided view.
Numerics  exact: each output element is the same dot product.
Memory    none: the module's parameters become views of the merged weight.
Pays      at every token count: one matmul reads x once and fills the device better than three.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compile.graph import CapturedGraph, refresh
from torchweave.compile.mutation import written
from torchweave.compile.passes.base import GraphPass, Mismatch, NearMiss, PassResult
from torchweave.compile.symbols import value

LINEAR = torch._C._nn.linear


@dataclass(frozen=True)
class _Linear:
    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


class MergeLinears(GraphPass):
    """See the module's text."""

    name = "merge_linears"
    stage = "torch_ir"
    numerics = "exact"

    def run(self, graph: CapturedGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        merged: dict[tuple[fx.Node, ...], tuple[fx.Node, fx.Node | None]] = {}
        matches = rewritten = 0
        for group in _groups(graph, near_misses):
            why = _refusal(graph, group, merged)
            if why is not None:
                near_misses.append(NearMiss(", ".join(item.node.name for item in group), why))
                continue
            _rewrite(graph, group, merged)
            matches += 1
            rewritten += len(group)
        graph.drop_unused_constants()
        return PassResult(matches, rewritten, tuple(near_misses))


def _groups(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[list[_Linear]]:
    """Linears over constants by the tensor they read, two or more, in the graph's order."""
    by_input: dict[fx.Node, list[_Linear]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is not LINEAR:
            continue
        try:
            x, weight, bias = GraphPass.bind(node, "input", "weight", bias=None)
        except Mismatch as mismatch:
            near_misses.append(NearMiss(node.name, str(mismatch)))
            continue
        by_input.setdefault(x, []).append(_Linear(node, x, weight, bias))
    for group in by_input.values():
        if len(group) < 2:
            continue
        usable = [item for item in group if _is_constant(graph, item.weight) and _is_constant(graph, item.bias, True)]
        for item in group:
            if item not in usable:
                near_misses.append(NearMiss(item.node.name, "its weight or bias is computed, not a parameter"))
        if len(usable) >= 2:
            yield usable


def _is_constant(graph: CapturedGraph, node: Any, optional: bool = False) -> bool:
    return (optional and node is None) or graph.constant(node) is not None


def _refusal(graph: CapturedGraph, group: list[_Linear], merged: dict) -> str | None:
    """Why a group cannot be merged, or None."""
    weights = [graph.constant(item.weight) for item in group]
    assert all(weight is not None for weight in weights)
    if len({(weight.dtype, weight.device, weight.ndim) for weight in weights if weight is not None}) > 1:
        return "the weights differ in dtype or device"
    if any(type(weight) not in (Tensor, torch.nn.Parameter) for weight in weights):
        return "a weight is a tensor subclass"
    if len({item.bias is None for item in group}) > 1:
        return "some have a bias and some have none"
    key = tuple(item.weight for item in group)
    parts = {weight for known in merged for weight in known}
    if key not in merged and (len(set(key)) < len(key) or parts & set(key)):
        return "a weight is already part of another merged weight"
    if (writer := _writer_between(group)) is not None:
        return f"{writer.name} lies between them and writes to a tensor"
    try:
        _fake_outputs(graph, group)
    except Exception as error:  # whatever a reader raises when it cannot take a strided view
        return f"a reader needs a contiguous result ({str(error).splitlines()[0]})"
    return None


def _writer_between(group: list[_Linear]) -> fx.Node | None:
    """A node from the first to the last linear that writes to a tensor; every boundary op is one."""
    node, last = group[0].node, group[-1].node
    while node is not last:
        node = node.next
        if written(node):
            return node
    return None


def _fake_outputs(graph: CapturedGraph, group: list[_Linear]) -> tuple[Any, tuple[Any, ...]]:
    """The merged linear's fake value and its parts, checked to suit every reader downstream."""
    sizes = [value(item.weight).shape[0] for item in group]
    with graph.fake_mode, torch.no_grad():
        weight = torch.cat([value(item.weight) for item in group])
        bias = (
            None if group[0].bias is None else torch.cat([value(item.bias) for item in group if item.bias is not None])
        )
        whole = torch.nn.functional.linear(value(group[0].x), weight, bias)
        parts = torch.split(whole, sizes, dim=-1)
    refresh(graph, {item.node: part for item, part in zip(group, parts, strict=True)}, commit=False)
    return whole, parts


def _rewrite(graph: CapturedGraph, group: list[_Linear], merged: dict) -> None:
    key = tuple(item.weight for item in group)
    if key not in merged:
        biases = [item.bias for item in group if item.bias is not None]
        merged[key] = (
            _merge(graph, [item.weight for item in group], "merged_weight"),
            _merge(graph, biases, "merged_bias") if biases else None,
        )
    weight, bias = merged[key]
    whole, parts = _fake_outputs(graph, group)
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
    refresh(graph, dict(zip(items, parts, strict=True)))


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
