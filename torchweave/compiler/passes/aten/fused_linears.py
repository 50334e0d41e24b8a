"""Fuse the RMSNorm before a linear of few tokens, and the gate or the residual add behind it, into the linear.

Before                                                       After
    y = torchweave.rms_norm(h, norm, eps, ...)                   a = torchweave.fused_linear(h, W, None, norm, eps, ...,
    gate_up = torchweave.linear(y, W)                                None, "silu", choices)
    a = torchweave.gated_activation(gate_up, "silu")             h = torchweave.fused_linear(a, V, ..., residual, None, choices)
    h = aten.add(residual, torchweave.linear(a, V))

Runs behind `raise_rms_norm` and `gated_activation`, and before `add_rms_norm`, which would fuse the residual add elsewhere.

When      W is a parameter of at least 2**20 elements for which `torchweave.ops.linear` has kernels; nothing else reads the
          intermediate results; the add has no alpha and does not broadcast or widen; tokens lie in one dimension. A linear takes
          a gate or a residual, not both.
Numerics  exact: same roundings; only the summation order differs.
Pays      up to 32 tokens on a GPU, where a launch costs as much as its computation: five dependent launches a layer remain. A
          table of measurements selects the kernel by token count (`compiler/tuning`); see bench/kernels/layer.py. Beyond that the
          BLAS computes most linears, and a residual add apart from the norm behind it costs a launch: 32 of them took 50 us of a
          step of 48 rows on Llama 1B (H100).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.linear  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.graph import FakeGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, Mismatch, PassResult, Stage, near_misses_by_reason
from torchweave.compiler.passes.torch_ir.small_linears import describe_weight, linear_choices
from torchweave.compiler.tuning.linears import FUSED_TOKENS
from torchweave.compiler.tuning.table import Table
from torchweave.ops.linear_config import supported

aten = torch.ops.aten
_ops = torch.ops.torchweave
_FUSED = _ops.fused_linear.default


@dataclass(frozen=True)
class FusableLinear:
    """A linear of x with its prologue and epilogue, as nodes; the fused op replaces the value of `last`."""

    x: fx.Node
    norm: tuple[Any, ...] | None
    residual: fx.Node | None
    activation: str | None
    last: fx.Node

    @property
    def letters(self) -> str:
        parts = (("n", self.norm), ("g", self.activation), ("r", self.residual))
        return "".join(letter for letter, part in parts if part is not None)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of a fused op: norm, eps, offset, wide, residual, activation."""
        return (*((None, 0.0, 0.0, False) if self.norm is None else self.norm[1:]), self.residual, self.activation)


class LinearFusionPass(GraphPass):
    """Base class: fuse each linear of a kind with the operations around it.

    Args:
        devices: device types on which linears are fused; on others the op is its reference, which only tests use.
    """

    stage: Stage = "aten"

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)

    @abstractmethod
    def operands(self, node: fx.Node) -> tuple[Any, ...]:
        """Arguments of a linear, x first; empty for another call.

        Raises:
            Mismatch: the reason why the fused op does not support them.
        """

    @abstractmethod
    def fused_call(self, operands: tuple[Any, ...], around: FusableLinear) -> tuple[Any, tuple[Any, ...]]:
        """The fused op and its arguments."""

    def prologue_norm(self, x: fx.Node) -> tuple[tuple[Any, ...] | None, str | None]:
        """Arguments of the norm that computes x, if only the linear reads x; else None and the reason if any."""
        if x.target is not _ops.rms_norm.default:
            return None, None
        arguments = self.bind(x, "x", "weight", "eps", offset=0.0, wide=False)
        if arguments[1] is None:
            return None, "its norm has no weight"
        return (None, f"its norm is also read by {_other_readers(x)}") if len(x.users) > 1 else (arguments, None)

    def run(self, graph: FakeGraph) -> PassResult:
        matches = rewritten = 0
        rejected: dict[str, list[str]] = {}
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or not isinstance(value(node), Tensor):
                continue
            if value(node).device.type not in self.devices:
                continue
            num_erased, why = self._fuse(graph, node)
            if num_erased:
                matches, rewritten = matches + 1, rewritten + num_erased
            if why is not None:
                rejected.setdefault(why, []).append(node.name)
        return PassResult(matches, rewritten, near_misses_by_reason(rejected))

    def _fuse(self, graph: FakeGraph, node: fx.Node) -> tuple[int, str | None]:
        """Fuse a linear with its prologue and epilogue; return the number of fused nodes, and why others were not."""
        try:
            operands = self.operands(node)
        except Mismatch as mismatch:
            return 0, str(mismatch)
        if not operands:
            return 0, None
        x = operands[0]
        if any(isinstance(size, torch.SymInt) or size != 1 for size in value(x).shape[:-2]):
            return 0, "its tokens are in more than one dimension"
        norm, why_norm = self.prologue_norm(x)
        last, activation, residual, why_epilogue = _epilogue(node)
        around, why = (
            FusableLinear(x if norm is None else norm[0], norm, residual, activation, last),
            why_norm or why_epilogue,
        )
        if not around.letters:
            return 0, why
        replaced = _replace(graph, last, *self.fused_call(operands, around))
        return (len(around.letters), why) if replaced else (0, "its result has another layout or dtype than the op's")


class FusedLinears(LinearFusionPass):
    """See the module's text.

    Args:
        devices: see `LinearFusionPass`.
        table: measurements; None: the table shipped for the device.
    """

    name = "fused_linears"
    token_range: tuple[int | None, int | None] = (1, FUSED_TOKENS)

    def __init__(self, devices: Iterable[str] = ("cuda",), table: Table | None = None) -> None:
        super().__init__(devices)
        self._table, self.table = table, "shipped" if table is None else table.digest

    def operands(self, node: fx.Node) -> tuple[Any, ...]:
        if node.target not in (aten.linear.default, _ops.linear.default):
            return ()
        x, weight, bias = self.bind(node, "input", "weight", bias=None, choices="")[:3]
        why = _reject_reason(x, weight, bias)
        if why is not None:
            raise Mismatch(why)
        return x, weight, bias

    def fused_call(self, operands: tuple[Any, ...], around: FusableLinear) -> tuple[Any, tuple[Any, ...]]:
        _, weight, bias = operands
        choices = linear_choices(value(weight), self._table, around.letters)
        return _FUSED, (around.x, weight, bias, *around.arguments, choices)


def _reject_reason(x: Any, weight: Any, bias: Any) -> str | None:
    """Why the op does not support the arguments, or has only the BLAS for them; else None."""
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or (bias is not None and bias.op != "placeholder"):
        return "its weight or bias is computed, not a parameter"
    w = value(weight)
    if w.ndim != 2 or not isinstance(w, Tensor) or not supported(w.shape[0], w.shape[1], w.dtype, fused=True):
        return f"for {describe_weight(w)} the op has no kernel but the BLAS"
    if bias is not None and not value(bias).is_contiguous():
        return "its bias is not contiguous"
    return None if value(x).dtype == w.dtype else "its input and weight differ in dtype"


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
        return node, None, None, f"the add behind it has an {mismatch}"
    residual = other if one is node else one
    if not isinstance(residual, fx.Node) or residual is node or not isinstance(value(residual), Tensor):
        return node, None, None, "the addend is not another tensor"
    if not same_geometry(value(residual), value(node)):
        return node, None, None, "the addend has another shape, layout or dtype"
    return user, None, residual, None


def _other_readers(x: fx.Node) -> str:
    return ", ".join(user.name for user in list(x.users)[1:])


def _replace(graph: FakeGraph, last: fx.Node, op: Any, arguments: tuple[Any, ...]) -> bool:
    """Insert the op before the last fused node; return whether its result has the same layout and dtype."""
    with graph.enable_fake_mode():
        result = op(*fx.map_arg(arguments, value))
    if not same_geometry(result, value(last)):
        return False
    with graph.graph.inserting_before(last):
        new = graph.graph.call_function(op, arguments)
    new.meta = {**last.meta, "val": result}
    last.replace_all_uses_with(new)
    graph.graph.eliminate_dead_code()
    return True
