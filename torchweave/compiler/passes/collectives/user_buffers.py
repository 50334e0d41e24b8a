"""User buffers in two passes: collectives read symmetric memory, and their operands are computed there.

`torchweave.ops.collectives.user_buffers` defines the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.collectives.user_buffers  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.graph import FakeGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import normalize_call
from torchweave.compiler.passes.base import (
    DevicePass,
    GraphPass,
    Mismatch,
    NearMiss,
    Need,
    PassResult,
    Stage,
)
from torchweave.compiler.passes.rewrite import erase

aten = torch.ops.aten
ops = torch.ops.torchweave

BUFFERED = {
    ops.all_reduce.default: ops.buffered_all_reduce.default,
    ops.all_reduce_add_rms_norm.default: ops.buffered_all_reduce_add_rms_norm.default,
    ops.all_reduce_add_rms_norm_fp8.default: ops.buffered_all_reduce_add_rms_norm_fp8.default,
    ops.all_reduce_add_rms_norm_fp4.default: ops.buffered_all_reduce_add_rms_norm_fp4.default,
}
"""Collectives, and their forms with a producer of the operand."""


class UserBuffersConvert(DevicePass):
    """Let consecutive collectives read their operand from symmetric memory.

    Before                                             After
        y, h = all_reduce_add_rms_norm(x, ...)             y, h = buffered_all_reduce_add_rms_norm("copy", [x], ..., slot, ...)

    When      a piece has two or more collectives over one group (all_reduce, with or without norm and quantization), each
              depending on the one before: only this fixes their order, and with it that neighbors use different slots. The
              first uses slot 0 and the last slot 1, so that pieces may run in any order.
    Numerics  exact: the same sums.
    Pays      nothing alone: the collective makes the same copy anyway. `userbuffers_prologue` removes it.
    """

    name = "userbuffers_convert"
    stage: Stage = "aten"
    needs: tuple[Need, ...] = ("ranks", "userbuffers")

    def run(self, graph: FakeGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        matches = 0
        for nodes in _by_group(graph, self.devices):
            ordered = _ordered(nodes, near_misses)
            if len(ordered) < 2:
                why = "no other collective of its group is in the piece, so its order among collectives is unknown"
                near_misses += [NearMiss(node.name, why) for node in ordered]
                continue
            for node, slot in zip(ordered, slots(len(ordered)), strict=True):
                _convert(node, slot)
                matches += 1
        return PassResult(matches, matches, tuple(near_misses))


def slots(count: int) -> list[int]:
    """Slots of consecutive collectives: the first 0, the last 1, neighbors differ."""
    alternating = [index % 2 for index in range(count)]
    return alternating if count % 2 == 0 else [*alternating[:-2], 2, 1]


def _by_group(graph: FakeGraph, devices: frozenset[str]) -> list[list[fx.Node]]:
    by_group: dict[str, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.target in BUFFERED and value(node.args[0]).device.type in devices:
            by_group.setdefault(str(_arguments(node)[-1]), []).append(node)
    return list(by_group.values())


def _ordered(nodes: list[fx.Node], near_misses: list[NearMiss]) -> list[fx.Node]:
    """The collectives of one group, or none if one does not depend on its predecessor: a compiler might swap them."""
    for at in range(1, len(nodes)):
        if nodes[at - 1] not in _sources(nodes[at], nodes[at - 1]):
            why = f"nothing orders it after {nodes[at - 1].name}: it does not depend on its result"
            near_misses += [
                NearMiss(node.name, why if node is nodes[at] else "another collective of its group is not ordered")
                for node in nodes
            ]
            return []
    return nodes


def _sources(node: fx.Node, oldest: fx.Node) -> set[fx.Node]:
    """Transitive inputs of a node, as far back as `oldest`."""
    sources: set[fx.Node] = set()
    pending = [node]
    while pending:
        for each in pending.pop().all_input_nodes:
            if each not in sources and not each < oldest:
                sources.add(each)
                pending.append(each)
    return sources


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    target: Any = node.target
    return normalize_call(target, node.args, node.kwargs)[0]


def _convert(node: fx.Node, slot: int) -> None:
    x, *rest, group = _arguments(node)
    node.args = ("copy", [x], "", value(x).dtype, slot, *rest, group)
    node.kwargs = {}
    node.target = BUFFERED[node.target]  # type: ignore[index]


class UserBuffersPrologue(GraphPass):
    """Compute the operand of a collective directly into the symmetric memory that the collective reads.

    Before                                                    After
        x = aten.linear(a, W, b)                                  y, h = buffered_all_reduce_add_rms_norm("linear", [a, W, b], ...)
        y, h = buffered_all_reduce_add_rms_norm("copy", [x], ...)

    When      x is a linear (`aten.linear`, `torchweave.linear`, `torchweave.fp8_linear`) or the sum of two tensors of one shape
              and dtype, and nothing else reads x.
    Numerics  exact: the same product by the same kernel.
    Pays      a pass over the operand and its launch, wherever the collective runs over symmetric memory.
    """

    name = "userbuffers_prologue"
    stage: Stage = "aten"
    needs: tuple[Need, ...] = ("ranks", "userbuffers")

    def run(self, graph: FakeGraph) -> PassResult:
        matches = rewritten = 0
        near_misses: list[NearMiss] = []
        for node in list(graph.graph.nodes):
            if node.target not in BUFFERED.values() or node.args[0] != "copy":
                continue
            (x,) = node.args[1]
            producer = _producer(x)
            if isinstance(producer, str):
                near_misses.append(NearMiss(node.name, producer))
                continue
            node.args = (*producer, *node.args[3:])
            rewritten += erase(graph, [x])
            matches += 1
        return PassResult(matches, rewritten, tuple(near_misses))


def _producer(x: fx.Node) -> tuple[str, list[fx.Node], str] | str:
    """Producer, operands and kernel choices of a collective's operand; else why a collective cannot compute it."""
    if len(x.users) > 1:
        return f"{x.name} is also read by {', '.join(user.name for user in list(x.users)[1:])}"
    try:
        if x.target in (aten.linear.default, ops.linear.default):
            a, w, bias, choices = GraphPass.bind(x, "input", "weight", bias=None, choices="")
            if value(w).ndim != 2 or value(a).dtype != value(w).dtype:
                return f"the weight of {x.name} is not [rows, columns] of its input's dtype"
            return "linear", [a, w, *([] if bias is None else [bias])], str(choices)
        if x.target is ops.fp8_linear.default:
            q, x_scale, w, w_scale, bias, _ = _arguments(x)
            return "fp8_linear", [q, x_scale, w, w_scale, *([] if bias is None else [bias])], ""
        if x.target is aten.add.Tensor:
            a, b = GraphPass.bind(x, "self", "other")
            is_equal_shape = (
                isinstance(b, fx.Node) and isinstance(value(b), Tensor) and same_geometry(value(a), value(b))
            )
            return (
                ("add", [a, b], "") if is_equal_shape else f"{x.name} has an addend of another shape, layout or dtype"
            )
    except Mismatch as mismatch:
        return f"{x.name} has an {mismatch}"
    return f"{x.name} is {_name(x)}, which cannot write to a given buffer"


def _name(node: fx.Node) -> str:
    return "made in another piece" if node.op == "placeholder" else str(node.target)
