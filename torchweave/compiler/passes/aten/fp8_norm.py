"""Fuse an RMSNorm, with or without the residual add before it, and the FP8 quantization of its result.

Before                                              After
    y, h = add_rms_norm(x, residual, w, eps, ...)       q, s, h = add_rms_norm_fp8(x, residual, w, eps, ..., group, scale)
    q, s = fp8_quant(y, group, scale)

    y = rms_norm(x, w, eps, ...)                        q, s = rms_norm_fp8(x, w, eps, ..., group, scale)
    q, s = fp8_quant(y, group, scale)

When      nothing else reads y. All three schemes of `fp8_quant`: static scale, one scale per token, one per 128 channels.
Numerics  exact: y is rounded to its dtype before quantization, as before. The kernel's reciprocal root differs from the eager one
          in the last bits of float32, which may change a number of y by one unit in its last place (2 ** -8 in bfloat16).
Pays      at every token count: one launch less; y is neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.quant.fp8_fused  # noqa: F401  (defines the ops)
from torchweave.compiler.passes.pattern import Fusion

ops = torch.ops.torchweave


def norm(x: Tensor, weight: Any, eps: float, offset: float, wide: bool, group: int, scale: Any) -> Any:
    y = ops.rms_norm.default(x, weight, eps, offset, wide)
    quantized = ops.fp8_quant.default(y, group, scale)
    return quantized[0], quantized[1]


def norm_fp8(x: Tensor, weight: Any, eps: float, offset: float, wide: bool, group: int, scale: Any) -> Any:
    fused = ops.rms_norm_fp8.default(x, weight, eps, offset, wide, group, scale)
    return fused[0], fused[1]


def add_norm(
    x: Tensor, residual: Tensor, weight: Any, eps: float, offset: float, wide: bool, group: int, scale: Any
) -> Any:
    outputs = ops.add_rms_norm.default(x, residual, weight, eps, offset, wide)
    quantized = ops.fp8_quant.default(outputs[0], group, scale)
    return quantized[0], quantized[1], outputs[1]


def add_norm_fp8(
    x: Tensor, residual: Tensor, weight: Any, eps: float, offset: float, wide: bool, group: int, scale: Any
) -> Any:
    fused = ops.add_rms_norm_fp8.default(x, residual, weight, eps, offset, wide, group, scale)
    return fused[0], fused[1], fused[2]


FUSION = Fusion("fp8_norm", (add_norm, norm), (add_norm_fp8, norm_fp8))
