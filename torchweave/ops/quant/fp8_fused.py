"""Ops with FP8 output: RMSNorm, with or without the residual add before it, and gated activations, fused with `fp8_quant`.

Each is bit-equal to its two parts in sequence: the norm or activation is rounded to x's dtype (`torchweave.ops.norm`,
`torchweave.ops.activation`) and then quantized (`torchweave.ops.quant.fp8`). It saves a launch, and a write and read in 16
bits. `group` and `scale` are those of `fp8_quant`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweave.ops.activation import gated_activation, get_activation
from torchweave.ops.norm import add_rms_norm, rms_norm
from torchweave.ops.quant.fp8 import empty_quantized, quantize
from torchweave.ops.registry import define


def _fake_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return empty_quantized(x, x.shape[-1], group, scale)


def _launch_norm(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.quant.fp8_fused import launch_norm_fp8

    return launch_norm_fp8(x, None, *how)[:2]


@define("torchweave::rms_norm_fp8", fake=_fake_norm, cuda=_launch_norm)
def rms_norm_fp8(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`fp8_quant(rms_norm(x, weight, eps, offset, wide), group, scale)`: x `[..., D]` -> (q, s)."""
    return quantize(rms_norm(x, weight, eps, offset, wide), group, scale)


def _fake_add(x: Tensor, residual: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_norm(x, *how), torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch_add(x: Tensor, residual: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    from torchweave.ops.kernels.quant.fp8_fused import launch_norm_fp8

    q, s, h = launch_norm_fp8(x, residual, *how)
    assert h is not None, "the sum is kept"
    return q, s, h


@define("torchweave::add_rms_norm_fp8", fake=_fake_add, cuda=_launch_add)
def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    wide: bool,
    group: int,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(q, s, h)`: `y, h = add_rms_norm(x, residual, ...)` and `q, s = fp8_quant(y, group, scale)`."""
    y, h = add_rms_norm(x, residual, weight, eps, offset, wide)
    return *quantize(y, group, scale), h


def _fake_gated(gate_up: Tensor, activation: str, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    get_activation(activation)
    return empty_quantized(gate_up, gate_up.shape[-1] // 2, group, scale)


def _launch_gated(gate_up: Tensor, activation: str, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.quant.fp8_fused import launch_gated_fp8

    return launch_gated_fp8(gate_up, activation, group, scale)


@define("torchweave::gated_activation_fp8", fake=_fake_gated, cuda=_launch_gated)
def gated_activation_fp8(
    gate_up: Tensor, activation: str, group: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`fp8_quant(gated_activation(gate_up, activation), group, scale)`: gate_up `[..., 2 * I]` -> (q `[..., I]`, s)."""
    return quantize(gated_activation(gate_up, activation), group, scale)
