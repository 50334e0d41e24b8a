"""RMSNorm as models compute it, alone and fused with the residual add before it.

Models differ in where they round (x in bfloat16 or float16, the mean of squares always in float32):

    y = x32 * rsqrt(mean(x32 ** 2) + eps)
    weight * y.to(x.dtype)                    Llama and most others: `wide` false
    (y * (offset + weight32)).to(x.dtype)     OLMo 2, GPT-OSS: `wide`, offset 0; Gemma: `wide`, offset 1
    y.to(x.dtype)                             without a weight

The eager references are those formulas; the kernel rounds at the same places. Free are the order of the sum of squares and the
last bits of rsqrt: |error| <= 2 ** -22 of a result before its final rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.registry import define


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False) -> Tensor:
    from torchweave.ops.kernels.norm import launch_norm

    return launch_norm(x, None, weight, eps, offset, wide)[0]


@define("torchweave::rms_norm", fake=_fake, cuda=_launch)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False) -> Tensor:
    """Norm over the last dimension.

    Args:
        x: `[..., D]`.
        weight: `[D]` or none.
        eps: added to the mean of squares.
        offset: added to the weight in float32; only when `wide`.
        wide: multiply by the weight in float32, before rounding to x's dtype; else after it.

    Returns:
        `[..., D]` of x's dtype, contiguous.
    """
    return _normalize(x, weight, eps, offset, wide).contiguous()


def _fake_add(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake(x), _fake(x)


def _launch_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False
) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.norm import launch_norm

    y, h = launch_norm(x, residual, weight, eps, offset, wide)
    assert h is not None, "the sum is kept"
    return y, h


@define("torchweave::add_rms_norm", fake=_fake_add, cuda=_launch_add)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """`(y, h)`: `h = x + residual`, rounded to its dtype, and `y = rms_norm(h, ...)`; operands of one shape and dtype."""
    h = (x + residual).contiguous()
    return _normalize(h, weight, eps, offset, wide), h


def _launch_last(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False
) -> Tensor:
    from torchweave.ops.kernels.norm import launch_norm

    return launch_norm(x, residual, weight, eps, offset, wide, keep_sum=False)[0]


@define("torchweave::rms_norm_of_sum", fake=_fake, cuda=_launch_last)
def rms_norm_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False
) -> Tensor:
    """`add_rms_norm` where nothing else reads the sum: only `y` is written."""
    return _normalize((x + residual).contiguous(), weight, eps, offset, wide)


def _launch_gated(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, activation: str
) -> Tensor:
    from torchweave.ops.kernels.norm import launch_norm

    return launch_norm(x, None, weight, eps, offset, wide, gate=gate, activation=activation)[0]


@define("torchweave::gated_rms_norm", fake=_fake, cuda=_launch_gated)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, activation: str
) -> Tensor:
    """`rms_norm(x, ...) * activation(gate)`, the activation and the product in float32, rounded to x's dtype; contiguous.

    Args:
        gate: `[..., D]` of x's dtype with as many rows as x, whose leading dimensions may differ.
        activation: `silu` or `sigmoid`.
    """
    activate = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation]
    active = activate(gate.reshape(x.shape).to(torch.float32))
    return (_normalize(x, weight, eps, offset, wide).to(torch.float32) * active).to(x.dtype).contiguous()


def _normalize(x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if not wide:
        return weight * y.to(x.dtype)
    scale = weight.to(torch.float32)
    if offset:
        scale = scale + offset
    return (y * scale).to(x.dtype)
