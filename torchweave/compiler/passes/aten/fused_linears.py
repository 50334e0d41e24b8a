"""Fuse the RMSNorm before a linear of few tokens, and the gate or the residual add after it, into the linear.

Before                                                       After
    y = torchweave.rms_norm(h, norm, eps, ...)                   a = torchweave.fused_linear(h, W, None, norm, eps, ...,
    gate_up = torchweave.linear(y, W)                                None, "silu", choices)
    a = torchweave.gated_activation(gate_up, "silu")             h = torchweave.fused_linear(a, V, ..., residual, None, choices)
    h = aten.add(residual, torchweave.linear(a, V))

A second add, of another branch of the layer, comes before the residual's. What `scale_linears` gave a linear stays with it.

Runs after `raise_rms_norm` and `gated_activation`, and before `add_rms_norm`, which would fuse the residual add elsewhere.

When      W is a parameter of at least 2**20 elements for which `torchweave.ops.linear` has kernels; nothing else reads the
          intermediate results; the add has no alpha and does not broadcast or widen; tokens lie in one dimension. A linear takes
          a gate or a residual, not both.
Numerics  exact: same roundings; only the summation order differs.
Pays      up to 32 tokens on a GPU, where a launch costs as much as its computation: five dependent launches a layer remain. A
          table of measurements selects the kernel by token count (`compiler/tuning`); see bench/kernels/layer.py. Beyond that the
          BLAS computes most linears, and a residual add apart from the norm after it costs a launch: 32 of them took 50 us of a
          step of 48 rows on Llama 1B (H100).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.linear  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.graph import FakeGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import DevicePass, GraphPass, Mismatch, PassResult, Stage, near_misses_by_reason
from torchweave.compiler.passes.torch_ir.small_linears import describe_weight, linear_choices
from torchweave.compiler.tuning.linears import FUSED_TOKENS, letters
from torchweave.compiler.tuning.table import Table
from torchweave.ops.linear_config import supported

aten = torch.ops.aten
_ops = torch.ops.torchweave
_FUSED = _ops.fused_linear.default
_SCALING = {"input_factor": 1.0, "factors": None, "factor": 1.0, "begin": 0, "end": 0}
"""The last arguments of `torchweave::linear`, and their defaults."""


@dataclass(frozen=True)
class _FusableLinear:
    """A linear with its prologue and epilogue, as nodes; the fused op replaces the value of `last`."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    norm: tuple[Any, ...] | None
    residual: fx.Node | None
    activation: str | None
    scaling: tuple[Any, ...]
    addend: fx.Node | None
    last: fx.Node

    @property
    def letters(self) -> str:
        return letters(self.norm, self.activation, self.residual)


class FusedLinears(DevicePass):
    """See the module's text.

    Args:
        devices: device types on which linears are fused; on others the op is its reference, which only tests use.
        table: measurements; None: the table shipped for the device.
    """

    name = "fused_linears"
    stage: Stage = "aten"
    token_range: tuple[int | None, int | None] = (1, FUSED_TOKENS)

    def __init__(self, devices: Iterable[str] = ("cuda",), table: Table | None = None) -> None:
        super().__init__(devices)
        self._table, self.table = table, "shipped" if table is None else table.digest

    def run(self, graph: FakeGraph) -> PassResult:
        products = [node for node in graph.graph.nodes if self._is_product(node)]
        matches = rewritten = 0
        rejected: dict[str, list[str]] = {}
        for node in products:
            num_erased, why = self._fuse(graph, node)
            if num_erased:
                matches, rewritten = matches + 1, rewritten + num_erased
            if why is not None:
                rejected.setdefault(why, []).append(node.name)
        return PassResult(matches, rewritten, near_misses_by_reason(rejected))

    def _is_product(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target not in (aten.linear.default, _ops.linear.default):
            return False
        return value(node).device.type in self.devices

    def _fuse(self, graph: FakeGraph, node: fx.Node) -> tuple[int, str | None]:
        """Fuse a linear with its prologue and epilogue; return the number of fused nodes, and why others were not."""
        try:
            x, weight, bias, _, *scaling = self.bind(node, "input", "weight", bias=None, choices="", **_SCALING)
        except Mismatch as mismatch:
            return 0, str(mismatch)
        why = _reject_reason(x, weight, bias)
        if why is not None:
            return 0, why
        norm, why_norm = _prologue_norm(x)
        last, activation, residual, why_epilogue = _epilogue(node)
        addend = None
        if residual is not None:
            last, addend, residual = _second_add(last, residual)
        inputs = (x if norm is None else norm[0], weight, bias)
        fusable = _FusableLinear(*inputs, norm, residual, activation, tuple(scaling), addend, last)
        why = why_norm or why_epilogue
        if not fusable.letters:
            return 0, why
        replaced = _replace(graph, fusable, linear_choices(value(weight), self._table, fusable.letters))
        return (len(fusable.letters), why) if replaced else (0, "its result has another layout or dtype than the op's")


def _reject_reason(x: Any, weight: Any, bias: Any) -> str | None:
    """Why the op does not support the arguments, or has only the BLAS for them; else None."""
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or (bias is not None and bias.op != "placeholder"):
        return "its weight or bias is computed, not a parameter"
    w = value(weight)
    if w.ndim != 2 or not isinstance(w, Tensor) or not supported(w.shape[0], w.shape[1], w.dtype, fused=True):
        return f"for {describe_weight(w)} the op has no kernel but the BLAS"
    if bias is not None and not value(bias).is_contiguous():
        return "its bias is not contiguous"
    if any(isinstance(size, torch.SymInt) or size != 1 for size in value(x).shape[:-2]) or value(x).dtype != w.dtype:
        return "its tokens are in more than one dimension, or its input and weight differ in dtype"
    return None


def _prologue_norm(x: fx.Node) -> tuple[tuple[Any, ...] | None, str | None]:
    """Arguments of the norm that computes x, if only the linear reads x; else None and the reason if any."""
    if x.target is not _ops.rms_norm.default:
        return None, None
    arguments = GraphPass.bind(x, "x", "weight", "eps", offset=0.0, wide=False)
    if arguments[1] is None:
        return None, "its norm has no weight"
    others = list(x.users)[1:]
    return (None, f"its norm is also read by {', '.join(map(str, others))}") if others else (arguments, None)


def _epilogue(node: fx.Node) -> tuple[fx.Node, str | None, fx.Node | None, str | None]:
    """Epilogue of a linear: last node, activation, residual, and the reason why both are None."""
    if len(node.users) != 1:
        return node, None, None, None
    (user,) = node.users
    if user.target is _ops.gated_activation.default:
        return user, str(user.args[1]), None, None
    if user.target is not aten.add.Tensor:
        return node, None, None, None
    try:
        one, other = GraphPass.bind(user, "self", "other")
    except Mismatch as mismatch:
        return node, None, None, f"the add after it has an {mismatch}"
    residual = other if one is node else one
    if not isinstance(residual, fx.Node) or residual is node or not isinstance(value(residual), Tensor):
        return node, None, None, "the addend is not another tensor"
    if not same_geometry(value(residual), value(node)):
        return node, None, None, "the addend has another shape, layout or dtype"
    return user, None, residual, None


def _second_add(add: fx.Node, residual: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node]:
    """The last add, the addend before it if there are two, and its residual: a layer may add two branches to its residual."""
    if len(add.users) != 1:
        return add, None, residual
    last, _, outer, _ = _epilogue(add)
    return (add, None, residual) if outer is None else (last, residual, outer)


def _replace(graph: FakeGraph, fusable: _FusableLinear, choices: str) -> bool:
    """Insert the op before the last fused node; return whether its result has the same layout and dtype."""
    norm = (None, 0.0, 0.0, False) if fusable.norm is None else fusable.norm[1:]
    linear, epilogue = (fusable.x, fusable.weight, fusable.bias), (fusable.residual, fusable.activation)
    arguments = (*linear, *norm, *epilogue, choices)
    if fusable.addend is not None or fusable.scaling != tuple(_SCALING.values()):
        arguments = (*arguments, *fusable.scaling, fusable.addend)
    with graph.enable_fake_mode():
        result = _FUSED(*fx.map_arg(arguments, value))
    if not same_geometry(result, value(fusable.last)):
        return False
    with graph.graph.inserting_before(fusable.last):
        new = graph.graph.call_function(_FUSED, arguments)
    new.meta = {**fusable.last.meta, "val": result}
    fusable.last.replace_all_uses_with(new)
    graph.graph.eliminate_dead_code()
    return True
