"""Fuse the activation of a gate and the product with up into one op, which reads a merged gate_up in place.

Before                                                      After
    gate, up = aten.split_with_sizes(x, [I, I], -1)             y = torchweave.gated_activation(x, "silu")
    y = aten.mul(aten.silu(gate), up)

Two tensors gate and up become `torchweave.gated_activation_pair(gate, up, ...)`.

When      the activation is silu, gelu, tanh gelu, relu or sigmoid; gate and up have one shape and dtype; nothing else reads the
          activation or, in the merged form, the halves.
Numerics  exact.
Pays      a launch and two passes over [T, I] in an FX build; see bench/compiler/fusions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchweave.ops.activation  # noqa: F401 (defines the ops)
from torchweave.compiler.passes.matcher import Match, either
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
torchweave_ops = torch.ops.torchweave

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda x: aten.silu.default(x),
    "gelu": lambda x: aten.gelu.default(x),
    "gelu_tanh": lambda x: aten.gelu.default(x, approximate="tanh"),
    "relu": lambda x: aten.relu.default(x),
    "sigmoid": lambda x: aten.sigmoid.default(x),
}


def _merged(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def pattern(gate_up: Tensor, sizes: list, size: int, dim: int) -> Any:
        parts = either(aten.split_with_sizes.default(gate_up, sizes, dim), aten.split.Tensor(gate_up, size, dim))
        return aten.mul.Tensor(ACTIVATIONS[name](parts[0]), parts[1])

    def replacement(gate_up: Tensor) -> Any:
        return torchweave_ops.gated_activation.default(gate_up, name)

    return pattern, replacement


def _pair(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def pattern(gate: Tensor, up: Tensor) -> Any:
        return aten.mul.Tensor(ACTIVATIONS[name](gate), up)

    def replacement(gate: Tensor, up: Tensor) -> Any:
        return torchweave_ops.gated_activation_pair.default(gate, up, name)

    return pattern, replacement


def extra_check(match: Match) -> str | None:
    if "gate" in match.bindings:
        gate, up = match.value("gate"), match.value("up")
        if list(map(str, gate.shape)) != list(map(str, up.shape)):
            return f"the product broadcasts {list(gate.shape)} and {list(up.shape)}"
        return None if gate.dtype == up.dtype else f"the product widens {gate.dtype} and {up.dtype}"
    gate_up, dim = match.value("gate_up"), match["dim"]
    width = gate_up.shape[-1]
    sizes = match.bindings.get("sizes") or [match["size"]] * 2
    if dim not in (-1, gate_up.dim() - 1):
        return f"the halves are split along dimension {dim}, not the last"
    if len(sizes) != 2 or sizes[0] != sizes[1] or 2 * sizes[0] != width:
        return f"the parts are {sizes} of {width}, not two halves"
    return None


_VARIANTS = [form(name) for form in (_merged, _pair) for name in ACTIVATIONS]

FUSION = Fusion(
    "gated_activation",
    *zip(*_VARIANTS, strict=True),
    extra_check=extra_check,
)
