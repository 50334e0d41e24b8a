"""NVFP4: numbers of four bits with a scale for each 16 of them, `torchweave::fp4_quant` and the product
`torchweave::fp4_linear`.

A number is a signed e2m1 code `c` in {0, 0.5, 1, 1.5, 2, 3, 4, 6} and has the value `c * s * scale`:

    scale   float32 [1], given: the tensor's largest size over (6 * 448), so that every s fits e4m3
    s       e4m3 = round(min(max over 16 channels of |x| / 6 / scale, 448))
    c       e2m1 = round(x / (s * scale)), nearest, a tie to the even code; saturates at 6; 0 where s is 0; NaN is not kept

Two codes share a byte, the even channel in its low half. The format is that of NVIDIA's Blackwell GPUs (PTX ISA, `cvt` to
e2m1x2; checkpoints of TensorRT Model Optimizer call the scales `weight_scale` and `weight_scale_2`). GPUs before Blackwell
cannot multiply it: there `fp4_linear` dequantizes, and FP4 saves memory only.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torchweave.ops.kernels.quant.formats import BLOCK, FP8, FP8_MAX, empty_fp4
from torchweave.ops.registry import define

FP4_MAX = 6.0
"""Largest number of e2m1."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; bit 3 is the sign."""


def fp4_scale_from_amax(amax: Tensor) -> Tensor:
    """float32 `[1]`: the scale of a tensor whose largest size is `amax`."""
    return (amax.float() / (FP4_MAX * FP8_MAX)).clamp(min=torch.finfo(torch.float32).tiny).reshape(1)


def nearest_codes(size: Tensor) -> Tensor:
    """Codes of the VALUES nearest to sizes; ties to the even code."""
    code = torch.zeros_like(size, dtype=torch.uint8)
    for number, (low, high) in enumerate(pairwise(VALUES)):
        middle = (low + high) / 2
        code += (size >= middle) if number % 2 else (size > middle)
    return code


def quantize_fp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`fp4_quant` in plain torch. The oracle of every kernel."""
    empty_fp4(x)
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    s = (blocks.abs().amax(-1) / FP4_MAX / scale).clamp(max=FP8_MAX).to(FP8)
    divisor = (s.float() * scale)[..., None]
    scaled = torch.where(divisor > 0, blocks / divisor, 0.0)
    codes = (nearest_codes(scaled.abs()) | (scaled.signbit().to(torch.uint8) << 3)).flatten(-2)
    return codes[..., ::2] | (codes[..., 1::2] << 4), s


def dequantize_fp4(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """`c * s` of q `[..., K / 2]` and s `[..., K / 16]`: `[..., K]`, exact in every 16-bit dtype; without `scale`."""
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2)
    values = torch.tensor(VALUES + tuple(-value for value in VALUES), dtype=dtype, device=q.device)
    blocks = values[codes.int()].unflatten(-1, (-1, BLOCK)) * s.to(dtype)[..., None]
    return blocks.flatten(-2)


def _fake_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return empty_fp4(x)


def _launch_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.quant.nvfp4_quant import launch_fp4_quant

    return launch_fp4_quant(x, scale)


@define("torchweave::fp4_quant", fake=_fake_quant, cuda=_launch_quant)
def fp4_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., K]`, scale float32 `[1]` -> (q uint8 `[..., K / 2]`, s e4m3 `[..., K / 16]`)."""
    return quantize_fp4(x, scale)


def _fake_linear(
    q: Tensor, s: Tensor, scale: Tensor, w: Tensor, w_s: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    return torch.empty((*q.shape[:-1], w.shape[0]), dtype=out_dtype, device=q.device)


def _launch_linear(
    q: Tensor, s: Tensor, scale: Tensor, w: Tensor, w_s: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    half = torch.bfloat16
    x, weight = dequantize_fp4(q, s, half).flatten(0, -2), dequantize_fp4(w, w_s, half)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32) * (scale * w_scale)
    return _finish(out, q, bias, out_dtype)


@define("torchweave::fp4_linear", fake=_fake_linear, cuda=_launch_linear)
def fp4_linear(
    q: Tensor, s: Tensor, scale: Tensor, w: Tensor, w_s: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """x @ W.T + bias of the values of (q, s, scale) and (w, w_s, w_scale): `[..., N]`, summed in float32, rounded once.

    Args:
        q, s, scale: the activation `[..., K]`, as `fp4_quant` returns it.
        w, w_s, w_scale: the weight `[N, K]` in the same format: uint8 `[N, K / 2]`, e4m3 `[N, K / 16]`, float32 `[1]`.
        bias: `[N]` or none.
        out_dtype: of the result.
    """
    wide = torch.float32
    x, weight = dequantize_fp4(q, s, wide).flatten(0, -2), dequantize_fp4(w, w_s, wide)
    return _finish((x @ weight.t()) * (scale * w_scale), q, bias, out_dtype)


def _finish(out: Tensor, q: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype).view(*q.shape[:-1], out.shape[-1])
