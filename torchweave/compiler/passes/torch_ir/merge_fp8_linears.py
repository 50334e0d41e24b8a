"""Quantise the input of several FP8 linears, such as q/k/v or gate/up, once, and merge the linears.

Before                                        After
    a, s = fp8_quant(x, group)                    a, s = fp8_quant(x, group)
    b, t = fp8_quant(x, group)                    y = fp8_linear(a, s, W, S)         W = [Wq; Wk], S = [Sq; Sk]
    q = fp8_linear(a, s, Wq, Sq)                  q, k = split(y, [...], -1)
    k = fp8_linear(b, t, Wk, Sk)

When      the quantizations have one group size and one static scale (the same tensor or value) or none; weights, scales and
          biases are parameters; scales are all by row, or all by block with weights of whole blocks; all calls have a bias or
          none has; no write to x and no boundary op lies between the calls; every reader of q, k takes a strided view.
Numerics  exact: each output element is the same dot product (a BLAS may sum in another order). A scale per tensor is repeated
          for each row, so that weights with different scales can be stacked.
Memory    none: the module's parameters become views of the stacked weight.
Pays      at every token count: x is quantized once, and one product uses the device better than three.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import torchweave.ops.quant.fp8_linear  # noqa: F401  (defines torchweave::fp8_linear)
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.mutation import storage_id
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes.base import GraphPass, NearMiss, PassResult
from torchweave.compiler.passes.torch_ir.stacking import StackableCall, find_barrier, merge_groups, mergeable_groups
from torchweave.ops.quant.fp8 import GROUP

QUANT = torch.ops.torchweave.fp8_quant.default
_LINEAR = torch.ops.torchweave.fp8_linear.default


class MergeFp8Linears(GraphPass):
    """See the module's text."""

    name = "merge_fp8_linears"

    def run(self, graph: CapturedGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        matches = rewritten = 0
        for num_erased in _share_quants(graph, near_misses):
            matches, rewritten = matches + 1, rewritten + num_erased
        merged, calls = merge_groups(graph, _groups(graph, near_misses), near_misses)
        return PassResult(matches + merged, rewritten + calls, tuple(near_misses))


def _share_quants(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[int]:
    """Merge equal quantizations of one tensor; yield the number of erased calls of each group."""
    by_input: dict[fx.Node, list[tuple[fx.Node, Any, Any]]] = {}
    for node, (x, group, scale) in calls_of(graph, QUANT):
        by_input.setdefault(x, []).append((node, group, scale))
    for x, quants in by_input.items():
        first, *others = quants
        num_erased = 0
        for node, group, scale in others:
            why = _difference(graph, first, (node, group, scale)) or find_barrier(graph, first[0], node, storage_id(x))
            if why is not None:
                near_misses.append(NearMiss(node.name, f"quantizes {x.name} like {first[0].name}, but {why}"))
                first = (node, group, scale)
                continue
            _replace_outputs(graph, node, first[0])
            num_erased += 1
        if num_erased:
            yield num_erased


def _difference(graph: CapturedGraph, one: tuple[fx.Node, Any, Any], other: tuple[fx.Node, Any, Any]) -> str | None:
    """Why two quantizations of one tensor differ, or None."""
    if one[1] != other[1]:
        return f"by groups of {other[1]}, not {one[1]}"
    if one[2] is other[2]:
        return None
    scales = [graph.constant(scale) for scale in (one[2], other[2])]
    if any(scale is None for scale in scales) or not torch.equal(*(scale for scale in scales if scale is not None)):
        return "with another given scale"
    return None


def _replace_outputs(graph: CapturedGraph, node: fx.Node, by: fx.Node) -> None:
    """Redirect the readers of a call with two results to another call."""
    parts = {user.args[1]: user for user in by.users if user.target is operator.getitem}
    for user in list(node.users):
        assert user.target is operator.getitem, "only getitem reads a result of several tensors"
        index = user.args[1]
        if index not in parts:
            with graph.graph.inserting_after(by):
                parts[index] = graph.graph.call_function(operator.getitem, (by, index))
            parts[index].meta = dict(user.meta)
        user.replace_all_uses_with(parts[index])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)


def _groups(graph: CapturedGraph, near_misses: list[NearMiss]) -> Iterator[list[StackableCall]]:
    """Groups of two or more products that read one quantized tensor and agree in kind, in graph order."""
    by_kind: dict[tuple[Any, ...], list[StackableCall]] = {}
    calls = list(calls_of(graph, _LINEAR))
    for node, (q, s, w, w_scale, bias, dtype) in calls:
        if sum(other[0] is q for _, other in calls) < 2:
            continue
        why = _reject_reason(graph, w, w_scale, bias)
        if why is not None:
            near_misses.append(NearMiss(node.name, why))
            continue
        constants = (w, w_scale) if bias is None else (w, w_scale, bias)
        call = StackableCall(node, q, constants, (q, s, w, w_scale, bias, dtype))
        by_kind.setdefault((q, s, value(w_scale).ndim, bias is None, dtype), []).append(call)
    for group in by_kind.values():
        yield from mergeable_groups(graph, group, near_misses)


def _reject_reason(graph: CapturedGraph, w: Any, w_scale: Any, bias: Any) -> str | None:
    """Why a weight cannot be stacked, or None."""
    if any(graph.constant(each) is None for each in (w, w_scale) if each is not None):
        return "its weight or scale is computed, not a parameter"
    if bias is not None and graph.constant(bias) is None:
        return "its bias is computed, not a parameter"
    if value(w_scale).ndim == 2 and value(w).shape[0] % GROUP:
        return f"its {value(w).shape[0]} rows are not whole blocks of {GROUP}, so the blocks after it would shift"
    return None
