"""Models' RMSNorm, written out in half a dozen operations, becomes one.

Before                                                       After
    x32 = aten._to_copy(x, dtype=float32)                        y = torchweave.rms_norm(x, weight, eps)
    mean = aten.mean(aten.pow(x32, 2), [-1], True)
    unit = aten.mul(x32, aten.rsqrt(aten.add(mean, eps)))
    y = aten.mul(weight, aten._to_copy(unit, dtype=x.dtype))

When      in one of the dialects of `torchweave.ops.norm`: rounded before the weight (Llama), after it (OLMo 2, GPT-OSS), or after
          a weight that is kept less one (Gemma); the norm is over the last dimension, and the result has x's dtype. In float32,
          where no dialect rounds, the casts are not there.
Numerics  exact.
Pays      as what other fusions join: 6 to 8 launches become one in an FX build. Inductor fuses them by itself; there `expand`
          writes them out again where nothing joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchweave.ops.norm  # noqa: F401 (defines torchweave::rms_norm)
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten


def _unit(x32: Any, eps: Any) -> Any:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(x32, 2), [-1], True)
    return aten.mul.Tensor(x32, aten.rsqrt.default(aten.add.Tensor(mean, eps)))


def _wide(x: Any) -> Any:
    return aten._to_copy.default(x, dtype=torch.float32)


def rounded_first(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    """Llama: weight * (x32 * rsqrt).to(dtype)."""
    return aten.mul.Tensor(weight, aten._to_copy.default(_unit(_wide(x), eps), dtype=dtype))


def rounded_last(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    """OLMo 2: (weight * (x32 * rsqrt)).to(dtype)."""
    return aten._to_copy.default(aten.mul.Tensor(weight, _unit(_wide(x), eps)), dtype=dtype)


def rounded_last_float32_weight(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    """Helium: the weight is cast to float32 as well, which changes no value."""
    return aten._to_copy.default(aten.mul.Tensor(_wide(weight), _unit(_wide(x), eps)), dtype=dtype)


def rounded_last_type_as(x: Tensor, weight: Tensor, eps: float) -> Any:
    """Gemma 4: ((x32 * rsqrt) * weight32).type_as(x)."""
    return aten.type_as.default(aten.mul.Tensor(_unit(_wide(x), eps), _wide(weight)), x)


def one_plus_weight(x: Tensor, weight: Tensor, eps: float, one: float) -> Any:
    """Gemma: ((x32 * rsqrt) * (1 + weight32)).type_as(x)."""
    scale = aten.add.Tensor(_wide(weight), one)
    return aten.type_as.default(aten.mul.Tensor(_unit(_wide(x), eps), scale), x)


def float32_one_plus_weight(x: Tensor, weight: Tensor, eps: float, one: float) -> Any:
    """Gemma in float32."""
    return aten.type_as.default(aten.mul.Tensor(_unit(x, eps), aten.add.Tensor(weight, one)), x)


def float32_type_as(x: Tensor, weight: Tensor, eps: float) -> Any:
    """Gemma 4 in float32."""
    return aten.type_as.default(aten.mul.Tensor(_unit(x, eps), weight), x)


def float32_plain(x: Tensor, weight: Tensor, eps: float) -> Any:
    """Every other dialect in float32."""
    return aten.mul.Tensor(weight, _unit(x, eps))


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Any:
    op = torch.ops.torchweave.rms_norm.default
    if not _heads_before_tokens(x):
        return op(x, weight, eps, offset, wide)
    # The op's result is contiguous; tokens go first there too.
    return aten.transpose.int(op(aten.transpose.int(x, 1, 2), weight, eps, offset, wide), 1, 2)


def _heads_before_tokens(x: Tensor) -> bool:
    """Whether x is [1, H, T, D] over memory of [1, T, H, D], where eager operations leave it."""
    return x.dim() == 4 and all(isinstance(step, int) for step in x.stride()[1:3]) and x.stride(1) < x.stride(2)


def narrow(x: Tensor, weight: Tensor, eps: float) -> Any:
    return _norm(x, weight, eps, 0.0, False)


def wide(x: Tensor, weight: Tensor, eps: float) -> Any:
    return _norm(x, weight, eps, 0.0, True)


def wide_one_plus_weight(x: Tensor, weight: Tensor, eps: float, one: float) -> Any:
    return _norm(x, weight, eps, one, True)


def extra_check(match: Match) -> str | None:
    x, weight = match.value("x"), match.value("weight")
    if weight.dim() != 1 or str(weight.shape[0]) != str(x.shape[-1]):
        return f"its weight is {list(weight.shape)}, not one number for each of {x.shape[-1]}"
    if x.dtype != weight.dtype:
        return f"its weight is {weight.dtype} and x {x.dtype}"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}"
    if any(node.target is aten._to_copy.default for node in match.nodes):
        return None
    if x.dtype != torch.float32:
        return f"its mean is taken in {x.dtype}, not in float32"
    (result,) = match.outputs
    if match["x"].target is aten._to_copy.default or any(user.target is aten.type_as.default for user in result.users):
        return "it is the inside of a norm with casts that no dialect has"
    return None


_VARIANTS: dict[Callable[..., Any], Callable[..., Any]] = {
    one_plus_weight: wide_one_plus_weight,
    float32_one_plus_weight: wide_one_plus_weight,
    rounded_last_type_as: wide,
    float32_type_as: wide,
    rounded_last_float32_weight: wide,
    rounded_last: wide,
    rounded_first: narrow,
    float32_plain: narrow,
}

FUSION = Fusion("raise_rms_norm", tuple(_VARIANTS), tuple(_VARIANTS.values()), extra_check=extra_check)
