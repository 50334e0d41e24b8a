"""Replace an RMSNorm that the model computes in half a dozen operations by one op.

Before                                                       After
    x32 = aten._to_copy(x, dtype=float32)                        y = torchweave.rms_norm(x, weight, eps)
    mean = aten.mean(aten.pow(x32, 2), [-1], True)
    unit = aten.mul(x32, aten.rsqrt(aten.add(mean, eps)))
    y = aten.mul(weight, aten._to_copy(unit, dtype=x.dtype))

When      in a dialect of `torchweave.compiler.passes.norm_dialects`: rounded before the weight (Llama), after it (OLMo 2, GPT-OSS,
          Gemma 4), or after the weight plus one (Gemma); the norm is over the last dimension, and the result has x's dtype.
Numerics  exact.
Pays      other fusions build on it: 6 to 8 launches become one in an FX build. Inductor fuses these operations itself; for it,
          `expand` writes the op out again where no other fusion took it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.norm  # noqa: F401 (defines torchweave::rms_norm)
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes import norm_dialects as dialects
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten


def narrow(x: Tensor, weight: Tensor, eps: float) -> Any:
    return _norm(x, weight, eps, 0.0, False)


def wide(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Any:
    return _norm(x, weight, eps, offset, True)


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Any:
    op = torch.ops.torchweave.rms_norm.default
    if not _heads_before_tokens(x):
        return op(x, weight, eps, offset, wide)
    # The op returns a contiguous tensor; eager mode would keep tokens outermost in memory.
    return aten.transpose.int(op(aten.transpose.int(x, 1, 2), weight, eps, offset, wide), 1, 2)


def _heads_before_tokens(x: Tensor) -> bool:
    """Whether x is `[1, H, T, D]` over memory of `[1, T, H, D]`, a layout that eager operations keep."""
    return x.dim() == 4 and all(isinstance(step, int) for step in x.stride()[1:3]) and x.stride(1) < x.stride(2)


def extra_check(match: Match) -> str | None:
    x, weight = match.value("x"), match.value("weight")
    if weight.dim() != 1 or str(weight.shape[0]) != str(x.shape[-1]):
        return f"its weight is {list(weight.shape)}, not one number for each of {x.shape[-1]}"
    if x.dtype != weight.dtype:
        return f"its weight is {weight.dtype} and x {x.dtype}"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}"
    casts = [node for node in match.nodes if node.target is aten._to_copy.default]
    if x.dtype != torch.float32 and not any(node.args[0] is match["x"] for node in casts):
        return f"its mean is taken in {x.dtype}, not in float32"
    (result,) = match.outputs
    inside = any(user.target is aten.type_as.default for user in result.users)
    if value(result).dtype != x.dtype or (not casts and (inside or match["x"].target is aten._to_copy.default)):
        return "it is the inside of a norm with casts that no dialect has"
    return None


FUSION = Fusion(
    "raise_rms_norm",
    (dialects.rounded_before_weight(dialects.ATEN), dialects.rounded_after_weight(dialects.ATEN)),
    (narrow, wide),
    extra_check=extra_check,
)
