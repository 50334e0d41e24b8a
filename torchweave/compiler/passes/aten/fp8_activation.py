"""Fuse a gated activation and the FP8 quantization of its result.

Before                                              After
    y = gated_activation(gate_up, activation)           q, s = gated_activation_fp8(gate_up, activation, group, scale)
    q, s = fp8_quant(y, group, scale)

When      nothing else reads y. All three schemes of `fp8_quant`: static scale, one scale per token, one per 128 channels.
Numerics  exact: y is rounded to its dtype before quantization, as before. The kernel's exponential differs from the eager one in
          the last bits of float32, which may change a number of y by one unit in its last place.
Pays      at every token count: one launch less; y is neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.quant.fp8_fused  # noqa: F401  (defines the ops)
from torchweave.compiler.passes.pattern import Fusion

ops = torch.ops.torchweave


def pattern(gate_up: Tensor, activation: str, group: int, scale: Any) -> Any:
    y = ops.gated_activation.default(gate_up, activation)
    quantized = ops.fp8_quant.default(y, group, scale)
    return quantized[0], quantized[1]


def replacement(gate_up: Tensor, activation: str, group: int, scale: Any) -> Any:
    fused = ops.gated_activation_fp8.default(gate_up, activation, group, scale)
    return fused[0], fused[1]


FUSION = Fusion("fp8_activation", pattern, replacement)
