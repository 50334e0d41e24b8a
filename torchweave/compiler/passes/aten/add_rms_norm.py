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

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.norm  # noqa: F401 (defines the ops)
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
torchweave_ops = torch.ops.torchweave


def sum_unused(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Any:
    h = aten.add.Tensor(x, residual)
    return torchweave_ops.rms_norm.default(h, weight, eps, offset, wide)


def sum_used(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Any:
    h = aten.add.Tensor(x, residual)
    return torchweave_ops.rms_norm.default(h, weight, eps, offset, wide), h


def only_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Any:
    return torchweave_ops.rms_norm_of_sum.default(x, residual, weight, eps, offset, wide)


def norm_and_sum(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, wide: bool) -> Any:
    return torchweave_ops.add_rms_norm.default(x, residual, weight, eps, offset, wide)


def extra_check(match: Match) -> str | None:
    x, residual = match.value("x"), match.value("residual")
    if list(map(str, x.shape)) != list(map(str, residual.shape)):
        return f"the add broadcasts {list(x.shape)} and {list(residual.shape)}"
    if x.dtype != residual.dtype:
        return f"the add widens {x.dtype} and {residual.dtype}"
    return None


FUSION = Fusion("add_rms_norm", (sum_unused, sum_used), (only_norm, norm_and_sum), extra_check=extra_check)
