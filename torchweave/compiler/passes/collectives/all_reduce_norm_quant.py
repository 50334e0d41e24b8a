"""Fuse an all-reduce with residual add and RMSNorm and the quantisation of its result to FP8 or FP4.

Before                                                        After
    y, h = torchweave.all_reduce_add_rms_norm(x, residual,        q, s, y, h = torchweave.all_reduce_add_rms_norm_fp8(x, residual,
                                              w, eps, ...)                         w, eps, ..., by, scale, ..., group)
    q, s = torchweave.fp8_quant(y, by, scale)                     (or ..._fp4 for torchweave.fp4_quant)

When      y is quantised to FP8 in any scheme of `fp8_quant` (static scale, one scale per token, one per 128 channels), or by
          `fp4_quant`. y is written only if other operations read it (`keep_norm`), and likewise h.
Numerics  exact: y is rounded to its dtype before quantisation, as before.
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
Rewrite = tuple[Callable[..., Any], Callable[..., Any]]


def _fp8(norm: bool, total: bool) -> Rewrite:
    """Pattern and replacement; `norm`, `total`: other operations read the norm, or the sum before it."""

    def pattern(
        x: Tensor, r: Any, w: Any, eps: float, offset: float, wide: bool, summed: bool, by: int, scale: Any, group: str
    ) -> Any:
        reduced = _reduced(x, r, w, eps, offset, wide, summed, group)
        read = [reduced[0], *([reduced[1]] if total else [])]
        quantized = ops.fp8_quant.default(read[0], by, scale)
        return quantized[0], quantized[1], *read[0 if norm else 1 :]

    def replacement(
        x: Tensor, r: Any, w: Any, eps: float, offset: float, wide: bool, by: int, scale: Any, group: str
    ) -> Any:
        fused = ops.all_reduce_add_rms_norm_fp8.default
        return _read_outputs(fused(x, r, w, eps, offset, wide, by, scale, norm, total, group), norm, total)

    return pattern, replacement


def _fp4(norm: bool, total: bool) -> Rewrite:
    def pattern(
        x: Tensor, r: Any, w: Any, eps: float, offset: float, wide: bool, summed: bool, scale: Tensor, group: str
    ) -> Any:
        reduced = _reduced(x, r, w, eps, offset, wide, summed, group)
        read = [reduced[0], *([reduced[1]] if total else [])]
        quantized = ops.fp4_quant.default(read[0], scale)
        return quantized[0], quantized[1], *read[0 if norm else 1 :]

    def replacement(x: Tensor, r: Any, w: Any, eps: float, offset: float, wide: bool, scale: Tensor, group: str) -> Any:
        fused = ops.all_reduce_add_rms_norm_fp4.default
        return _read_outputs(fused(x, r, w, eps, offset, wide, scale, norm, total, group), norm, total)

    return pattern, replacement


def _read_outputs(results: tuple[Tensor, ...], norm: bool, total: bool) -> list[Tensor]:
    q, s, y, h = results
    return [q, s, *([y] if norm else []), *([h] if total else [])]


def _fusion(name: str, variant: Callable[..., Rewrite]) -> Fusion:
    variants = [variant(norm, total) for norm in (False, True) for total in (False, True)]
    patterns, replacements = zip(*variants, strict=True)
    return Fusion(name, patterns, replacements, needs=("ranks",))


FP8 = _fusion("all_reduce_norm_fp8", _fp8)
FP4 = _fusion("all_reduce_norm_fp4", _fp4)
