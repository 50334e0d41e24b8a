"""Fuse an all-reduce, the residual add behind it and the RMSNorm behind that.

Before                                             After
    h = aten.add(torchweave.all_reduce(x, group),      y, h = torchweave.all_reduce_add_rms_norm(x, residual, w, eps, ...,
                 residual)                                                                       keep_sum, group)
    y = torchweave.rms_norm(h, w, eps, ...)

Runs behind `raise_rms_norm` and before `fused_linears`, which would take the norm into the product that reads it; where this
finds nothing, that still does. A norm of the sum over ranks itself (Gemma 2, OLMo 2) has no residual, and h is that sum.

When      the residual has the shape and dtype of the sum over ranks, the add has no alpha, and nothing else reads that sum. y and h
          may be read by whoever likes; where nobody else reads h, it is not written.
Numerics  exact: rounded where the separate operations round.
Pays      at every token count: two launches and three passes over the hidden state less. How the ranks meet (one-shot or two-shot
          over symmetric memory, or NCCL) is the communicator's choice by the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.collectives.all_reduce_norm
import torchweave.ops.norm  # noqa: F401 (defines the ops)
from torchweave.compiler.passes.aten.add_rms_norm import extra_check as same_residual_kind
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
ops = torch.ops.torchweave
_reduce = ops.all_reduce.default
_norm = ops.rms_norm.default
_fused = ops.all_reduce_add_rms_norm.default


def sum_unused(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str
) -> Any:
    return _norm(aten.add.Tensor(_reduce(x, group), residual), weight, eps, offset, wide)


def sum_used(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str
) -> Any:
    h = aten.add.Tensor(_reduce(x, group), residual)
    return _norm(h, weight, eps, offset, wide), h


def no_residual(x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str) -> Any:
    return _norm(_reduce(x, group), weight, eps, offset, wide)


def no_residual_sum_used(x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str) -> Any:
    h = _reduce(x, group)
    return _norm(h, weight, eps, offset, wide), h


def fused_sum_unused(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str
) -> Any:
    return _fused(x, residual, weight, eps, offset, wide, False, group)[0]


def fused_sum_used(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str
) -> Any:
    return _fused(x, residual, weight, eps, offset, wide, True, group)


def fused_no_residual(x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str) -> Any:
    return _fused(x, None, weight, eps, offset, wide, False, group)[0]


def fused_no_residual_sum_used(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str
) -> Any:
    return _fused(x, None, weight, eps, offset, wide, True, group)


def extra_check(match: Match) -> str | None:
    return same_residual_kind(match) if "residual" in match.bindings else None


FUSION = Fusion(
    "all_reduce_norm",
    (sum_unused, sum_used, no_residual, no_residual_sum_used),
    (fused_sum_unused, fused_sum_used, fused_no_residual, fused_no_residual_sum_used),
    extra_check=extra_check,
    needs=("ranks",),
)
