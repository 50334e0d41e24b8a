"""NVFP4: numbers of four bits with a scale for each 16 of them, `torchweave::fp4_quant` and its inverse.

A number is a signed e2m1 code `c` in {0, 0.5, 1, 1.5, 2, 3, 4, 6} and has the value `c * s * scale`:

    scale   float32 [1], given: the tensor's largest size over (6 * 448), so that every s fits e4m3
    s       e4m3 = round(min(max over 16 channels of |x| / 6 / scale, 448))
    c       e2m1 = round(x / (s * scale)), nearest, a tie to the even code; saturates at 6; 0 where s is 0; NaN is not kept

Two codes share a byte, the even channel in its low half. The format is that of NVIDIA's Blackwell GPUs (PTX ISA, `cvt` to
e2m1x2; checkpoints of TensorRT Model Optimizer call the scales `weight_scale` and `weight_scale_2`). GPUs before Blackwell
cannot multiply it: there activations are rounded and dequantized, which shows the accuracy of W4A4 and saves no time.
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
    """`c * s` of q `[..., K / 2]` and s `[..., K / 16]`: `[..., K]`, exact in every 16-bit dtype; without `scale`.

    Integer arithmetic instead of a table: nothing is copied to the device, and a compiler fuses it.
    """
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).int()
    size = codes & 7
    twice = torch.where(size < 2, size, (2 | (size & 1)) << ((size >> 1) - 1).clamp(min=0))
    values = torch.where(codes > 7, -twice, twice).to(dtype) * 0.5
    return (values.unflatten(-1, (-1, BLOCK)) * s.to(dtype)[..., None]).flatten(-2)


def _fake_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return empty_fp4(x)


def _launch_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.quant.nvfp4_quant import launch_fp4_quant

    return launch_fp4_quant(x, scale)


@define("torchweave::fp4_quant", fake=_fake_quant, cuda=_launch_quant)
def fp4_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., K]`, scale float32 `[1]` -> (q uint8 `[..., K / 2]`, s e4m3 `[..., K / 16]`)."""
    return quantize_fp4(x, scale)
