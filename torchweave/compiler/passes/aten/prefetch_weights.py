"""Prefetch the weight of the next linear while a step routes its tokens to experts.

Before                                                After
    weights, index = torchweave.route(logits, ...)        weights, index = torchweave.route(logits, ..., prefetch=W)
    y = torchweave.experts(x, index, weights, ...)        y = torchweave.experts(x, index, weights, ...)
    z = torchweave.fused_linear(y, W, ...)                z = torchweave.fused_linear(y, W, ...)

Router and routing wait for each other's launch, not for the memory, and which experts' weights follow is not known before.

When      W is a contiguous parameter of at least 2**20 elements, of the first linear behind the routing in the same piece.
Numerics  exact: a prefetch has no result.
Pays      one or two tokens on a GPU, at which reading the weights is the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

import torchweave.ops.linear
import torchweave.ops.moe.routing  # noqa: F401 (both define the ops)
from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, PassResult, Stage, near_misses_by_reason
from torchweave.compiler.tuning.linears import FUSED_TOKENS

_ops = torch.ops.torchweave
_LINEARS = (_ops.linear.default, _ops.fused_linear.default, torch.ops.aten.linear.default)
_MIN_WEIGHT = 1 << 20  # elements: below, the launch dominates


class PrefetchWeights(GraphPass):
    """See the module's text.

    Args:
        devices: device types on which weights are prefetched.
    """

    name = "prefetch_weights"
    stage: Stage = "aten"
    token_range: tuple[int | None, int | None] = (1, FUSED_TOKENS)

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)

    def run(self, graph: FakeGraph) -> PassResult:
        matches = 0
        rejected: dict[str, list[str]] = {}
        for node in graph.graph.find_nodes(op="call_function", target=_ops.route.default):
            if value(node)[0].device.type not in self.devices or node.kwargs.get("prefetch") is not None:
                continue
            weight = _next_weight(node)
            if weight is None:
                rejected.setdefault("no linear of a large parameter follows in its piece", []).append(node.name)
                continue
            node.kwargs = {**node.kwargs, "prefetch": weight}
            matches += 1
        return PassResult(matches, matches, near_misses_by_reason(rejected))


def _next_weight(route: fx.Node) -> fx.Node | None:
    """The weight of the first linear behind the routing; None if it is small, computed or has gaps."""
    node = route.next
    while node.op != "output":
        if node.op == "call_function" and node.target in _LINEARS:
            weight = node.args[1]
            large = isinstance(weight, fx.Node) and weight.op == "placeholder" and value(weight).numel() >= _MIN_WEIGHT
            return weight if large and value(weight).is_contiguous() else None
        node = node.next
    return None
