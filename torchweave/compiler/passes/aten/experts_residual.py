"""Add the residual to the output of routed experts in their last kernel.

Before                                                     After
    y = torchweave.experts(x, index, w, up, down, ...)         r = aten.view(residual, [-1, K])
    h = aten.add(residual, aten.view(y, [1, T, K]))            y = torchweave.experts(x, index, w, up, down, ..., residual=r)
                                                               h = aten.view(y, [1, T, K])

Runs after `fused_linears`, which takes the norm that reads h into a linear, and before `add_rms_norm`, which would fuse the add
there.

When      nothing else reads the experts' output; the add has no alpha and does not broadcast or widen. Quantized experts as well;
          not over several ranks, whose outputs an all-reduce sums.
Numerics  exact: the op adds the residual to its rounded result.
Pays      up to 32 tokens on a GPU, where the norm after the add runs inside a linear: a launch a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.moe.experts
import torchweave.ops.moe.quantized_experts  # noqa: F401 (both define the ops)
from torchweave.compiler.ir.graph import FakeGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import DevicePass, GraphPass, Mismatch, PassResult, Stage, near_misses_by_reason
from torchweave.compiler.tuning.linears import FUSED_TOKENS

aten = torch.ops.aten
_OPS = (torch.ops.torchweave.experts.default, torch.ops.torchweave.quantized_experts.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class ExpertsResidual(DevicePass):
    """See the module's text."""

    name = "experts_residual"
    stage: Stage = "aten"
    token_range: tuple[int | None, int | None] = (1, FUSED_TOKENS)

    def run(self, graph: FakeGraph) -> PassResult:
        matches = 0
        rejected: dict[str, list[str]] = {}
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node.target not in _OPS or value(node).device.type not in self.devices:
                continue
            views, add, why = _sum_behind(node)
            if add is not None:
                why = _fuse(graph, node, views, add)
            if why is None:
                matches += 1
            else:
                rejected.setdefault(why, []).append(node.name)
        return PassResult(matches, matches, near_misses_by_reason(rejected))


def _sum_behind(experts: fx.Node) -> tuple[list[fx.Node], fx.Node | None, str | None]:
    """Views of the experts' output, and the add that alone reads them; else None and the reason."""
    views, last = [], experts
    while len(last.users) == 1:
        (user,) = last.users
        if user.target is aten.add.Tensor:
            return views, user, None
        if user.target not in _VIEWS:
            return views, None, f"{user.name}, not an add, reads its output"
        views.append(user)
        last = user
    return views, None, f"its output has {len(last.users)} readers"


def _fuse(graph: FakeGraph, experts: fx.Node, views: list[fx.Node], add: fx.Node) -> str | None:
    """Replace the experts and the add after them; the reason if that is impossible, or None."""
    output = views[-1] if views else experts
    try:
        one, other = GraphPass.bind(add, "self", "other")
    except Mismatch as mismatch:
        return f"the add after it has an {mismatch}"
    residual: Any = other if one is output else one
    if not isinstance(residual, fx.Node) or residual is output or not isinstance(value(residual), Tensor):
        return "the addend is not another tensor"
    if experts.kwargs.get("residual") is not None:
        return "it has a residual"
    if not same_geometry(value(residual), value(output)) or not value(residual).is_contiguous():
        return "the addend has another shape, layout or dtype"
    with graph.graph.inserting_before(add):
        rows = graph.graph.call_function(aten.view.default, (residual, [-1, value(experts).shape[-1]]))
        with graph.enable_fake_mode():
            rows.meta["val"] = aten.view.default(value(residual), [-1, value(experts).shape[-1]])
        op: Any = experts.target
        fused = graph.graph.call_function(op, experts.args, {**experts.kwargs, "residual": rows})
    fused.meta = dict(experts.meta)
    experts.replace_all_uses_with(fused)
    for view in views:
        add.prepend(view)
    add.replace_all_uses_with(views[-1] if views else fused)
    graph.graph.erase_node(add)
    graph.graph.erase_node(experts)
    return None
