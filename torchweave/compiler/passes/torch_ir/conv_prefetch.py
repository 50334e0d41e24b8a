"""Prefetch the weight of the next linear while a convolution and what reads it run.

Before                                                After
    torchweave.causal_conv(x, w, b, out, 0, "silu")       torchweave.causal_conv(x, w, b, out, 0, "silu", W)
    torchweave.gated_delta(...)                           torchweave.gated_delta(...)
    y = torchweave.linear(z, W, None, choices)            y = torchweave.linear(z, W, None, choices)

A recurrent layer's kernels between its two products wait for each other, not for the memory. Runs behind `small_linears`.

When      W is a contiguous parameter of at least 2**20 elements, of the first linear behind the convolution, for which
          `torchweave.ops.linear` has kernels.
Numerics  exact: a prefetch has no result.
Pays      one or two tokens on a GPU, at which reading the weights is the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

import torchweave.ops.linear
import torchweave.ops.recurrent.op  # noqa: F401 (both define the ops)
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import boundary_op, normalize_call
from torchweave.compiler.passes.base import GraphPass, PassResult, near_misses_by_reason

CONV = "torchweave::causal_conv"
_LINEAR = torch.ops.torchweave.linear.default
_MIN_WEIGHT = 1 << 20  # elements: below, the launch dominates


class ConvPrefetch(GraphPass):
    """See the module's text.

    Args:
        devices: device types on which weights are prefetched.
    """

    name = "conv_prefetch"

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)

    def run(self, graph: CapturedGraph) -> PassResult:
        matches = 0
        rejected: dict[str, list[str]] = {}
        for node in list(graph.graph.nodes):
            op = boundary_op(node.target, frozenset({CONV})) if node.op == "call_function" else None
            if op is None:
                continue
            given, _ = normalize_call(op, node.args, node.kwargs)
            *arguments, prefetched = given
            if prefetched is not None or value(arguments[0]).device.type not in self.devices:
                continue
            weight = _next_weight(graph, node)
            if weight is None:
                rejected.setdefault("no linear of a large parameter follows", []).append(node.name)
                continue
            node.args, node.kwargs = (*arguments, weight), {}
            matches += 1
        return PassResult(matches, matches, near_misses_by_reason(rejected))


def _next_weight(graph: CapturedGraph, conv: fx.Node) -> fx.Node | None:
    """The weight of the first linear behind a convolution; None if there is none, or it is small, computed or has gaps."""
    node = conv.next
    while node.op != "output" and node.target is not _LINEAR:
        node = node.next
    weight = None if node.op == "output" else graph.constant(node.args[1])
    if weight is None or weight.numel() < _MIN_WEIGHT or not weight.is_contiguous():
        return None
    return node.args[1]  # type: ignore[return-value]
