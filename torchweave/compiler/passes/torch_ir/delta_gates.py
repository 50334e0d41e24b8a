"""Move the gates of the gated delta rule into the op, and give it each key head once.

Before                                                      After
    g = -A_log.float().exp() * softplus(a.float() + bias)       torchweave.gated_delta(q[0], k[0], v, a[0], b[0], out, ...,
    beta = b.sigmoid()                                                                 A_log, bias)
    q = q.repeat_interleave(n, dim=2)
    k = k.repeat_interleave(n, dim=2)
    torchweave.gated_delta(q[0], k[0], v, g[0], beta[0], out, ...)

When      the decay has one number a head (Qwen 3-Next, Qwen 3.5, OLMo hybrid); A_log and bias are `[HV]`. A beta that is scaled
          stays in the piece, and so does then the decay. Queries and keys are both repeated, once for each value head.
Numerics  exact: the kernels compute the gates with the same roundings, and read each key head for its value heads.
Pays      two launches a layer, four with repeated heads: 1.5 to 2 us each of a decode step of Qwen 3.5 35B on an H100.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torchweave.ops.recurrent.op  # noqa: F401 (defines torchweave::gated_delta)
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes.base import GraphPass, PassResult, near_misses_by_reason
from torchweave.compiler.passes.matcher import Match, PartialMatch, Pattern, either
from torchweave.compiler.passes.rewrite import erase

_DELTA = torch.ops.torchweave.gated_delta.default
_Q, _K, _V, _G, _BETA, _A_LOG = 0, 1, 2, 3, 4, 8
"""Positions in the op's arguments."""


def _decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Any:
    rate = -either(A_log.float(), A_log.to(torch.float32)).exp()
    return (rate * F.softplus(either(a.float(), a.to(torch.float32)) + dt_bias))[0]


def _rate(b: Tensor) -> Any:
    return either(b.sigmoid(), torch.sigmoid(b))[0]


def _repeated(x: Tensor, times: int) -> Any:
    return x.repeat_interleave(times, dim=2)[0]


_DECAY, _RATE, _REPEATED = (Pattern(each, torch_ir=True) for each in (_decay, _rate, _repeated))


class DeltaGates(GraphPass):
    """See the module's text."""

    name = "delta_gates"

    def run(self, graph: CapturedGraph) -> PassResult:
        matches, before = 0, graph.num_calls()
        rejected: dict[str, list[str]] = {}
        for node, given in calls_of(graph, _DELTA):
            arguments = list(given)
            found, why = _heads(graph, node, arguments), None
            if arguments[_A_LOG] is None:
                gates = _gates(arguments)
                if isinstance(gates, str):
                    why = gates
                else:
                    found += gates
                    decay, rate = gates
                    arguments[_G], arguments[_BETA] = _first(graph, node, decay["a"]), _first(graph, node, rate["b"])
                    arguments[_A_LOG:] = decay["A_log"], decay["dt_bias"]
            if why:
                rejected.setdefault(why, []).append(node.name)
            if found:
                matches += 1
                node.args, node.kwargs = tuple(arguments), {}
                for match in found:
                    erase(graph, match.nodes)
        graph.drop_unused_constants()
        return PassResult(matches, before - graph.num_calls(), near_misses_by_reason(rejected))


def _heads(graph: CapturedGraph, node: fx.Node, arguments: list[Any]) -> list[Match]:
    """Replace repeated queries and keys in `arguments` by what is repeated; return the matches."""
    found = [_REPEATED.match_at(arguments[position]) for position in (_Q, _K)]
    matches = [match for match in found if isinstance(match, Match)]
    if len(matches) < 2:
        return []
    heads = {int(match.value("x").shape[2]) for match in matches}
    if len(heads) > 1 or value(arguments[_V]).shape[1] != matches[0]["times"] * heads.pop():
        return []
    arguments[_Q], arguments[_K] = (_first(graph, node, match["x"]) for match in matches)
    return matches


def _gates(arguments: list[Any]) -> tuple[Match, Match] | str:
    """The matches of decay and rate, or the reason why the gates stay; empty where nothing resembles them."""
    decay, rate = _DECAY.match_at(arguments[_G]), _RATE.match_at(arguments[_BETA])
    for match in (decay, rate):
        if not isinstance(match, Match):
            return match.why if isinstance(match, PartialMatch) else ""
    assert isinstance(decay, Match) and isinstance(rate, Match)
    heads = [value(arguments[_V]).shape[1]]
    if list(decay.value("A_log").shape) != heads or list(decay.value("dt_bias").shape) != heads:
        return "A_log or the bias is not one number a head"
    return decay, rate


def _first(graph: CapturedGraph, node: fx.Node, source: fx.Node) -> fx.Node:
    """`source[0]`, inserted before `node`."""
    with graph.graph.inserting_before(node):
        return graph.call("select", source, 0, 0)
