"""Expand fused ops into their references where Inductor compiles the parts to faster code.

Before                                             After
    y = torchweave.rms_norm(x, weight, eps)            the operations of the op's eager reference, traced

When      Inductor builds the piece for a device on which ops run their references, and the op is one of `EXPANDED_OPS`.
Numerics  exact: the reference defines the op.
Pays      on a CPU, where an opaque op stops Inductor from fusing across it. On an H100 the ops' own kernels took 0.3 to 0.9 of
          the time of Inductor's code up to 256 tokens and were level beyond (bench/results/fusions_h100_202611.json), so they
          stay.
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
from torchweave.compiler.passes.base import Build, GraphPass, PassResult, Stage
from torchweave.compiler.passes.rewrite import insert
from torchweave.ops.registry import op_info

EXPANDED_OPS = (
    "torchweave::rms_norm",
    "torchweave::add_rms_norm",
    "torchweave::rms_norm_of_sum",
    "torchweave::gated_rms_norm",
    "torchweave::gated_activation",
    "torchweave::gated_activation_pair",
    "torchweave::rope",
    "torchweave::qk_norm_rope",
)
"""Ops that are expanded by default."""


class Expand(GraphPass):
    """See the module's text.

    Args:
        ops: names of the ops to expand.
    """

    name = "expand"
    stage: Stage = "aten"
    builds: tuple[Build, ...] = ("inductor",)
    devices = frozenset({"cpu"})

    def __init__(self, ops: Iterable[str] = EXPANDED_OPS) -> None:
        self.ops = frozenset(ops)

    def run(self, graph: FakeGraph) -> PassResult:
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
    """Redirect the readers of an op's result, or of its parts, to the expanded nodes."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for reader in list(node.users):
            assert reader.target is operator.getitem, f"{reader.name} reads all results of {node.name} at once"
            reader.replace_all_uses_with(new[reader.args[1]])
            graph.graph.erase_node(reader)
    graph.graph.erase_node(node)
