"""Fuse an all-reduce with residual add and RMSNorm and the quantization of its result to FP8 or FP4.

Before                                                        After
    y, h = torchweave.all_reduce_add_rms_norm(x, residual,        q, s, y, h = torchweave.all_reduce_add_rms_norm_fp8(x, residual,
                                              w, eps, ...)                         w, eps, ..., by, scale, ..., group)
    q, s = torchweave.fp8_quant(y, by, scale)                     (or ..._fp4 for torchweave.fp4_quant)

When      y is quantized to FP8 in any scheme of `fp8_quant` (static scale, one scale per token, one per 128 channels), or by
          `fp4_quant`. y is written only if other operations read it (`keep_norm`), and likewise h.
Numerics  exact: y is rounded to its dtype before quantization, as before.
Pays      at every token count: one launch less; y is not read, or neither written nor read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchweave.ops.collectives.all_reduce_norm  # noqa: F401 (defines the ops)
from torchweave.compiler.passes.pattern import Fusion

ops = torch.ops.torchweave
_reduced = ops.all_reduce_add_rms_norm.default


def _variant(fp8: bool, norm: bool, total: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement; `norm`, `total`: other operations read the norm, or the sum before it."""

    def pattern(
        x: Tensor, r: Any, w: Any, eps: float, offset: float, wide: bool, summed: bool, by: int, scale: Any, group: str
    ) -> Any:
        reduced = _reduced(x, r, w, eps, offset, wide, summed, group)
        read = [reduced[0], *([reduced[1]] if total else [])]
        quantized = ops.fp8_quant.default(read[0], by, scale) if fp8 else ops.fp4_quant.default(read[0], scale)
        return quantized[0], quantized[1], *read[0 if norm else 1 :]

    def replacement(
        x: Tensor, r: Any, w: Any, eps: float, offset: float, wide: bool, scale: Any, group: str, by: int = 0
    ) -> Any:
        fused = ops.all_reduce_add_rms_norm_fp8.default if fp8 else ops.all_reduce_add_rms_norm_fp4.default
        q, s, y, h = fused(x, r, w, eps, offset, wide, *((by, scale) if fp8 else (scale,)), norm, total, group)
        return [q, s, *([y] if norm else []), *([h] if total else [])]

    return pattern, replacement


def _fusion(name: str, fp8: bool) -> Fusion:
    variants = [_variant(fp8, norm, total) for norm in (False, True) for total in (False, True)]
    patterns, replacements = zip(*variants, strict=True)
    return Fusion(name, patterns, replacements, needs=("ranks",))


FP8 = _fusion("all_reduce_norm_fp8", fp8=True)
FP4 = _fusion("all_reduce_norm_fp4", fp8=False)
