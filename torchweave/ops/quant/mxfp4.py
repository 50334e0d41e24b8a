"""MXFP4: signed e2m1 numbers with a power of two for each 32 of a row (OCP Microscaling Formats, version 1.0).

A code `c` in {0, 0.5, 1, 1.5, 2, 3, 4, 6}, with a sign in bit 3, has the value `c * 2 ** (s - 127)`. Two codes share a byte, the
even channel in its low half; s is uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.quant.nvfp4 import nearest_codes

MX_BLOCK = 32
"""Channels that share a scale."""
_BIAS, _LARGEST_EXPONENT = 127, 2  # of s; of 4, the largest power of two among the codes


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., K]` -> (uint8 `[..., K / 2]`, s uint8 `[..., K / 32]`), rounded to the nearest; K is a multiple of 32."""
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    exponent = torch.frexp(blocks.abs().amax(-1))[1] - 1 - _LARGEST_EXPONENT
    s = (exponent + _BIAS).clamp(1, 254)
    scaled = torch.ldexp(blocks, (_BIAS - s)[..., None])
    codes = (nearest_codes(scaled.abs()) | (scaled.signbit().to(torch.uint8) << 3)).flatten(-2)
    return codes[..., ::2] | (codes[..., 1::2] << 4), s.to(torch.uint8)
