"""Dialects of RMSNorm: each formula is written once, over the operations of the stage whose graph is searched.

`x32` is x in float32, `unit = x32 * rsqrt(mean(x32 ** 2) + eps)`; Gemma 4 writes the root as `pow(..., -0.5)`, which torch computes
by rsqrt.

    weight * unit.to(dtype)                                Llama and most others: rounded before the weight
    (weight * unit).to(dtype)                              OLMo 2, GPT-OSS; Helium with the weight in float32
    (unit * weight32).type_as(x)                           Gemma 4
    (unit * (1 + weight32)).type_as(x)                     Gemma

The canonical op is `torchweave::rms_norm` (`torchweave.ops.norm`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweave.compiler.passes.matcher import either

aten = torch.ops.aten


class NormOps(NamedTuple):
    """Spellings of the casts and reductions of a norm in the graphs of a stage."""

    to_float32: Callable[[Any], Any]
    weight_to_float32: Callable[[Any], Any]
    rounded: Callable[[Any, Any], Any]
    type_as: Callable[[Any, Any], Any]
    mean_of_squares: Callable[[Any], Any]
    inverse_root: Callable[[Any], Any]


# Lowered graphs have no `_to_copy` where it changes nothing, as in a model in float32.
ATEN = NormOps(
    to_float32=lambda x: either(aten._to_copy.default(x, dtype=torch.float32), x),
    weight_to_float32=lambda weight: either(aten._to_copy.default(weight, dtype=torch.float32), weight),
    rounded=lambda y, dtype: either(aten._to_copy.default(y, dtype=dtype), y),
    type_as=aten.type_as.default,
    mean_of_squares=lambda x: aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True),
    inverse_root=lambda mean: either(aten.rsqrt.default(mean), aten.pow.Tensor_Scalar(mean, -0.5)),
)
TORCH_IR = NormOps(
    to_float32=lambda x: either(x.to(torch.float32), x.float()),
    weight_to_float32=lambda weight: either(weight.to(torch.float32), weight.float(), weight),
    rounded=lambda y, dtype: y.to(dtype),
    type_as=lambda y, x: y.type_as(x),
    mean_of_squares=lambda x: x.pow(2).mean(-1, keepdim=True),
    inverse_root=lambda mean: either(torch.rsqrt(mean), torch.pow(mean, -0.5)),
)


def rounded_before_weight(ops: NormOps) -> Callable[..., Any]:
    """The pattern of dialects that multiply by the weight in x's dtype (`wide` false)."""

    def rounded_before_weight(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
        return weight * ops.rounded(_unit(ops, x, eps), dtype)

    return rounded_before_weight


def rounded_after_weight(ops: NormOps) -> Callable[..., Any]:
    """The pattern of dialects that multiply by the weight, or by the weight plus `offset`, in float32 (`wide`)."""

    def rounded_after_weight(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Any:
        weight32 = ops.weight_to_float32(weight)
        scaled = _unit(ops, x, eps) * either(weight32 + offset, weight32)
        return either(ops.type_as(scaled, x), ops.rounded(scaled, dtype))

    return rounded_after_weight


def _unit(ops: NormOps, x: Any, eps: Any) -> Any:
    x32 = ops.to_float32(x)
    return x32 * ops.inverse_root(ops.mean_of_squares(x32) + eps)
