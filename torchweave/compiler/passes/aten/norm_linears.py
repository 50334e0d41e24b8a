"""Fuse an RMSNorm that several readers have into the small linear among them, which returns its result as well.

Before                                                     After
    n = torchweave.rms_norm(h, norm, eps, ...)                 y, n = torchweave.norm_linear(h, W, None, norm, eps, ..., choices)
    y = torchweave.linear(aten.view(n, [T, K]), W)             e = torchweave.experts(aten.view(n, [T, K]), ...)
    e = torchweave.experts(aten.view(n, [T, K]), ...)

The router of experts, whose input the experts read besides. Runs behind `fused_linears`, which takes norms with one reader.

When      W is a parameter of fewer than 2**20 elements for which `torchweave.ops.linear` has kernels; tokens lie in one dimension.
Numerics  exact: same roundings; only the summation order differs.
Pays      one and two tokens on a GPU: a launch a layer. Every program of the product computes the norm, and one writes it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

import torchweave.ops.linear  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.graph import FakeGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, Mismatch, PassResult, Stage, near_misses_by_reason
from torchweave.compiler.tuning.linears import FUSED_TOKENS
from torchweave.ops.linear_config import supported

aten = torch.ops.aten
_ops = torch.ops.torchweave
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_OP = _ops.norm_linear.default


class NormLinears(GraphPass):
    """See the module's text.

    Args:
        devices: device types on which the norm is fused.
    """

    name = "norm_linears"
    stage: Stage = "aten"
    token_range: tuple[int | None, int | None] = (1, FUSED_TOKENS)

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)

    def run(self, graph: FakeGraph) -> PassResult:
        matches = 0
        rejected: dict[str, list[str]] = {}
        for node in graph.graph.find_nodes(op="call_function", target=_ops.linear.default):
            if value(node).device.type not in self.devices:
                continue
            why = _fuse(graph, node)
            if why is None:
                matches += 1
            elif why:
                rejected.setdefault(why, []).append(node.name)
        return PassResult(matches, 2 * matches, near_misses_by_reason(rejected))


def _fuse(graph: FakeGraph, linear: fx.Node) -> str | None:
    """Fuse the norm before a linear; the reason if that is impossible, empty where it has none, or None."""
    try:
        x, weight, bias, choices = GraphPass.bind(linear, "x", "w", bias=None, choices="")
    except Mismatch as mismatch:
        return str(mismatch)
    norm: Any = x
    while isinstance(norm, fx.Node) and norm.target in _VIEWS:
        norm = norm.args[0]
    if not isinstance(norm, fx.Node) or norm.target is not _ops.rms_norm.default:
        return ""
    h, scale, *dialect = GraphPass.bind(norm, "x", "weight", "eps", offset=0.0, wide=False)
    w = value(weight)
    parameters = all(each is None or each.op == "placeholder" for each in (weight, bias))
    if not parameters or not choices or supported(w.shape[0], w.shape[1], w.dtype, fused=True):
        return "its weight or bias is computed, has no kernel, or is large"
    if scale is None or value(h).dtype != w.dtype or value(x).shape[-1] != value(h).shape[-1]:
        return "its norm has no weight, or another dtype or width"
    if any(isinstance(size, torch.SymInt) or size != 1 for size in value(h).shape[:-2]):
        return "its tokens are in more than one dimension"
    arguments = (h, weight, bias, scale, *dialect, choices)
    with graph.enable_fake_mode():
        results = _OP(*fx.map_arg(arguments, value))
        shaped = results[0] if x is norm else aten.view.default(results[0], [-1, w.shape[0]])
    if not same_geometry(shaped, value(linear)) or not same_geometry(results[1], value(norm)):
        return "its result has another layout or dtype than the op's"
    with graph.graph.inserting_before(norm):
        fused = graph.graph.call_function(_OP, arguments)
        product, normalized = (graph.graph.call_function(operator.getitem, (fused, item)) for item in (0, 1))
        y = product if x is norm else graph.graph.call_function(aten.view.default, (product, [-1, w.shape[0]]))
    for each, result in ((fused, results), (product, results[0]), (normalized, results[1]), (y, shaped)):
        each.meta = {**linear.meta, "val": result}
    norm.replace_all_uses_with(normalized)
    linear.replace_all_uses_with(y)
    graph.graph.eliminate_dead_code()
    return None
