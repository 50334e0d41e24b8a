"""Fuse the gate after an RMSNorm into it, which reads its rows from a merged projection in place.

Before                                                        After
    y = torchweave.rms_norm(x, weight, eps)                       y = torchweave.gated_rms_norm(x, z, weight, eps, ..., "silu")
    g = aten._unsafe_view(aten.clone(z), [rows, D])
    s = aten.silu(aten._to_copy(g, dtype=float32))
    y = aten._to_copy(aten.mul(y, s), dtype=x.dtype)

Runs after `raise_rms_norm`. Norm before gate is the order of the gated delta rule's layers (Qwen 3-Next, Qwen 3.5, Kimi linear);
Mamba2's layers gate before the norm.

When      the activation is silu or sigmoid, in float32; x and z have one dtype and as many rows of D; nothing else reads the norm.
Numerics  exact.
Pays      a launch a layer: 1.4 us and the pause before it in a decode step of Qwen 3.5 35B on an H100.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchweave.ops.norm  # noqa: F401 (defines the ops)
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.aten.gated_activation import ACTIVATIONS
from torchweave.compiler.passes.matcher import Match, either
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
torchweave_ops = torch.ops.torchweave


def _variant(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def pattern(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, offset: float, wide: bool, rows: list, dtype: torch.dtype
    ) -> Any:
        y = torchweave_ops.rms_norm.default(x, weight, eps, offset, wide)
        copied = aten.clone.default(gate, memory_format=torch.contiguous_format)
        flat = either(aten._unsafe_view.default(copied, rows), gate)
        active = ACTIVATIONS[name](either(aten._to_copy.default(flat, dtype=torch.float32), flat))
        product = aten.mul.Tensor(y, active)
        return either(aten._to_copy.default(product, dtype=dtype), product)

    def replacement(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, offset: float = 0.0, wide: bool = False
    ) -> Any:
        return torchweave_ops.gated_rms_norm.default(x, gate, weight, eps, offset, wide, name)

    return pattern, replacement


def extra_check(match: Match) -> str | None:
    x, gate = match.value("x"), match.value("gate")
    if x.dtype != gate.dtype:
        return f"x is {x.dtype} and its gate {gate.dtype}"
    (result,) = match.outputs
    if value(result).dtype != x.dtype:
        return f"its result stays {value(result).dtype}"
    wide = any(
        node.target is aten._to_copy.default and node.kwargs.get("dtype") == torch.float32 for node in match.nodes
    )
    if x.dtype != torch.float32 and not wide:
        return f"its activation is computed in {gate.dtype}"
    if str(gate.shape[-1]) != str(x.shape[-1]):
        return f"its gate has {gate.shape[-1]} columns, not {x.shape[-1]}"
    if "rows" not in match.bindings and list(map(str, gate.shape)) != list(map(str, x.shape)):
        return f"the product broadcasts {list(x.shape)} and {list(gate.shape)}"
    return None


FUSION = Fusion(
    "gated_rms_norm",
    *zip(*(_variant(name) for name in ("silu", "sigmoid")), strict=True),
    extra_check=extra_check,
)
