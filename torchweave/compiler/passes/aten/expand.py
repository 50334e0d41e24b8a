"""Write ops out again where a build by Inductor runs faster on their parts than on the ops.

Before                                             After
    y = torchweave.rms_norm(x, weight, eps)            the operations of the op's eager reference, as `trace` finds them

When      the piece is built by Inductor for a device on which the ops are their references, and the op is one of `EXPANDED_OPS`.
Numerics  exact: the reference is what the op computes.
Pays      on a CPU, where Inductor fuses across what would be an op that it cannot see into. On an H100 the ops' own kernels
          took 0.3 to 0.9 of the time of Inductor's code up to 256 tokens, and were level beyond
          (bench/results/fusions_h100_202611.json): there they stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

import torchweave.ops.activation
import torchweave.ops.norm
import torchweave.ops.rope  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import normalize_call
from torchweave.compiler.passes.base import Build, GraphPass, Numerics, PassResult, Stage
from torchweave.compiler.passes.rewrite import insert
from torchweave.ops.registry import op_info

EXPANDED_OPS = (
    "torchweave::rms_norm",
    "torchweave::add_rms_norm",
    "torchweave::rms_norm_of_sum",
    "torchweave::gated_activation",
    "torchweave::gated_activation_pair",
    "torchweave::rope",
    "torchweave::qk_norm_rope",
)
"""The ops that are written out unless they are kept."""


class Expand(GraphPass):
    """See the module's text.

    Args:
        ops: names of the ops that are written out.
        devices: types of devices on which they are.
    """

    name = "expand"
    stage: Stage = "aten"
    numerics: Numerics = "exact"
    builds: tuple[Build, ...] = ("inductor",)

    def __init__(self, ops: Iterable[str] = EXPANDED_OPS, devices: Iterable[str] = ("cpu",)) -> None:
        self.ops = frozenset(ops)
        self.devices = frozenset(devices)

    def run(self, graph: FakeGraph) -> PassResult:
        """See `Pass.run`."""
        matches = 0
        for node in list(graph.graph.nodes):
            op = node.target
            if not isinstance(op, torch._ops.OpOverload) or op._schema.name not in self.ops:
                continue
            arguments, _ = normalize_call(op, node.args, node.kwargs)
            if value(arguments[0]).device.type not in self.devices:
                continue
            new = insert(graph, node, op_info(op._schema.name).reference, arguments)
            _replace(graph, node, new)
            matches += 1
        return PassResult(matches, matches)


def _replace(graph: FakeGraph, node: fx.Node, new: Any) -> None:
    """Hand the readers of an op's result, or of the parts of it, what stands for them."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for reader in list(node.users):
            assert reader.target is operator.getitem, f"{reader.name} reads {node.name} whole"
            reader.replace_all_uses_with(new[reader.args[1]])
            graph.graph.erase_node(reader)
    graph.graph.erase_node(node)
