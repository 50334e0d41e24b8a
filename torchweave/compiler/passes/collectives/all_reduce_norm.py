"""Fuse an all-reduce, the residual add after it and the RMSNorm after that.

Before                                             After
    h = aten.add(torchweave.all_reduce(x, group),      y, h = torchweave.all_reduce_add_rms_norm(x, residual, w, eps, ...,
                 residual)                                                                       keep_sum, group)
    y = torchweave.rms_norm(h, w, eps, ...)

Runs after `raise_rms_norm` and before `fused_linears`, which fuses norms without an all-reduce into the linears that read them.
A norm of the sum over ranks itself (Gemma 2, OLMo 2) has no residual, and h is that sum.

When      the residual has the shape and dtype of the sum over ranks, the add has no alpha, and nothing else reads that sum. y and
          h may have any readers; h is written only if other operations read it.
Numerics  exact: same roundings as the separate operations.
Pays      at every token count: two launches and three passes over the hidden state less. The communicator selects the algorithm
          (one-shot or two-shot over symmetric memory, or NCCL) by token count.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _variant(has_residual: bool, total: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement with or without a residual; `total`: other operations read h."""

    def pattern(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str
    ) -> Any:
        h = aten.add.Tensor(_reduce(x, group), residual) if has_residual else _reduce(x, group)
        y = _norm(h, weight, eps, offset, wide)
        return (y, h) if total else y

    def replacement(
        x: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool, group: str, residual: Any = None
    ) -> Any:
        results = _fused(x, residual, weight, eps, offset, wide, total, group)
        return results if total else results[0]

    return pattern, replacement


def extra_check(match: Match) -> str | None:
    return same_residual_kind(match) if "residual" in match.bindings else None


_VARIANTS = [_variant(has_residual, total) for has_residual in (True, False) for total in (False, True)]

FUSION = Fusion(
    "all_reduce_norm",
    *zip(*_VARIANTS, strict=True),
    extra_check=extra_check,
    needs=("ranks",),
)
