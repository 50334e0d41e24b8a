"""Move the decay of Mamba's layers and the gate after their scan into the op.

Before                                                      After
    A = -exp(A_log.float())                                     torchweave.ssd(x, dt, A_log, ..., out, ..., z, log_rate=True)
    torchweave.ssd(x, dt, A, ..., out, ...)                     y = out[None].view(1, T, -1)
    y = out[None].view(1, T, -1) * silu(gate)

When      both for `torchweave.ssd`; the decay for `torchweave.selective_scan`, which takes its gate. The decay is computed in
          float32; the gate has the dtype of out, is known before the op, and multiplies out itself, as in Falcon-H1: others
          normalize out first.
Numerics  exact: the kernels compute both with the same roundings.
Pays      a launch each and layer in a decode step: parameters change seldom, but a captured graph computes with them every time.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torchweave.ops.recurrent.op  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.graph import CapturedGraph, same_geometry
from torchweave.compiler.ir.mutation import op_overload
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes.base import GraphPass, PassResult, near_misses_by_reason
from torchweave.compiler.passes.matcher import Match, PartialMatch, Pattern, either
from torchweave.compiler.passes.rewrite import erase

_SSD, _SCAN = torch.ops.torchweave.ssd.default, torch.ops.torchweave.selective_scan.default
_A, _OUT, _Z = 2, 7, 12
"""Positions in the arguments of `ssd`; the first is that of `selective_scan`, too."""
_VIEWS = (operator.getitem, "view", "reshape")


def _decay(A_log: Tensor) -> Any:
    wide = either(A_log.float(), A_log.to(torch.float32), A_log)
    return -either(torch.exp(wide), wide.exp())


_DECAY = Pattern(_decay, torch_ir=True)


class ScanGates(GraphPass):
    """See the module's text."""

    name = "scan_gates"

    def run(self, graph: CapturedGraph) -> PassResult:
        matches, before = 0, graph.num_calls()
        rejected: dict[str, list[str]] = {}
        for node, given in calls_of(graph, _SSD, _SCAN):
            arguments = list(given)
            wide = not arguments[-1] and value(arguments[_A]).dtype == torch.float32
            decay = _DECAY.match_at(arguments[_A]) if wide else None
            gate = _gate(node, arguments) if op_overload(node.target) is _SSD and arguments[_Z] is None else None
            for why in (
                decay.why if isinstance(decay, PartialMatch) else None,
                gate if isinstance(gate, str) else None,
            ):
                if why is not None:
                    rejected.setdefault(why, []).append(node.name)
            if isinstance(decay, Match):
                arguments[_A], arguments[-1] = decay["A_log"], True
            if isinstance(gate, tuple):
                arguments[_Z] = _by_head(graph, node, gate[0], arguments[_OUT])
            if isinstance(decay, Match) or isinstance(gate, tuple):
                node.args, node.kwargs = tuple(arguments), {}
            if isinstance(decay, Match):
                matches += 1
                erase(graph, decay.nodes)
            if isinstance(gate, tuple):
                matches += 1
                _, active, product = gate
                scanned = next(each for each in product.all_input_nodes if each is not active)
                product.replace_all_uses_with(scanned)
                erase(graph, [active, product])
        return PassResult(matches, before - graph.num_calls(), near_misses_by_reason(rejected))


def _gate(node: fx.Node, arguments: list[Any]) -> tuple[fx.Node, fx.Node, fx.Node] | str | None:
    """The gate of an op's result, its activation and the product; the reason why it stays, None where there is none."""
    readers = [user for user in arguments[_OUT].users if user is not node]
    while len(readers) == 1 and readers[0].target in _VIEWS:
        readers = list(readers[0].users)
    if len(readers) != 1 or readers[0].target not in (operator.mul, torch.mul):
        return None
    (product,) = readers
    active = next((each for each in product.all_input_nodes if each.target is F.silu), None)
    if active is None or len(product.all_input_nodes) != 2:
        return None
    gate, (scanned,) = active.args[0], (each for each in product.all_input_nodes if each is not active)
    if len(active.users) > 1:
        return f"its activated gate is also read by {list(active.users)[1].name}"
    if not isinstance(gate, fx.Node) or not gate < node:
        return "its gate is computed after the op"
    if not same_geometry(value(scanned), value(product)) or value(gate).dtype != value(product).dtype:
        return "its product with the gate has another shape, layout or dtype than its result"
    if list(map(str, value(gate).shape)) != list(map(str, value(product).shape)):
        return "its gate is broadcast"
    return gate, active, product


def _by_head(graph: CapturedGraph, node: fx.Node, gate: fx.Node, out: fx.Node) -> fx.Node:
    """A gate `[1, T, H * P]` as `[T, H, P]`, inserted before `node`."""
    with graph.graph.inserting_before(node):
        return graph.call("unflatten", graph.call("select", gate, 0, 0), -1, tuple(value(out).shape[1:]))
