"""Fuse a residual add into the RMSNorm that reads it.

Before                                             After
    h = aten.add(x, residual)                          y, h = torchweave.add_rms_norm(x, residual, w, eps, ...)
    y = torchweave.rms_norm(h, w, eps, ...)

When      both operands have the shape and dtype of h, and the add has no alpha. Where nothing else reads h, the op is
          `torchweave.rms_norm_of_sum`, which does not write h.
Numerics  exact.
Pays      a launch and two passes over the hidden state in an FX build; see bench/compiler/fusions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchweave.ops.norm  # noqa: F401 (defines the ops)
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
torchweave_ops = torch.ops.torchweave


def _variant(total: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement; `total`: other operations read h."""
    op = torchweave_ops.add_rms_norm.default if total else torchweave_ops.rms_norm_of_sum.default

    def pattern(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Any:
        h = aten.add.Tensor(x, residual)
        y = torchweave_ops.rms_norm.default(h, weight, eps, offset, wide)
        return (y, h) if total else y

    def replacement(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Any:
        return op(x, residual, weight, eps, offset, wide)

    return pattern, replacement


def extra_check(match: Match) -> str | None:
    x, residual = match.value("x"), match.value("residual")
    if list(map(str, x.shape)) != list(map(str, residual.shape)):
        return f"the add broadcasts {list(x.shape)} and {list(residual.shape)}"
    if x.dtype != residual.dtype:
        return f"the add widens {x.dtype} and {residual.dtype}"
    return None


FUSION = Fusion(
    "add_rms_norm", *zip(*(_variant(total) for total in (False, True)), strict=True), extra_check=extra_check
)
