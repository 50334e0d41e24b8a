"""Linears that read their weight at full speed when there are few tokens, alone and with what stands around them.

`torchweave::linear` is F.linear. `torchweave::fused_linear` also normalises its input, gates one half of its output by the other,
or adds a residual: what a decoder layer has between two of its products. The number of tokens is symbolic in the captured graph
but known when an op runs, which is when a CUDA graph is recorded: so the op, not the compiler, takes the BLAS or one of the
project's kernels, bucket by bucket, as its argument `choices` says (`linear_config`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops import activation as _activation  # noqa: F401 (registers the ops that stand around a product)
from torchweave.ops import norm as _norm  # noqa: F401
from torchweave.ops.linear_config import LinearConfig, pick
from torchweave.ops.registry import define


@dataclass(frozen=True)
class Around:
    """What a product is fused with; the default is nothing.

    Attributes:
        bias: `[N]`, added to the product before it is rounded.
        norm: weight `[K]` of the RMSNorm of x; `eps`, `offset` and `wide` as in `torchweave::rms_norm`.
        residual: `[T, N]`, added to the rounded product.
        activation: gates the first half of the product's columns by the second: `[T, N // 2]`; see `torchweave.ops.activation`.
    """

    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    wide: bool = False
    residual: Tensor | None = None
    activation: str | None = None


NOTHING = Around()


def run(config: LinearConfig, x: Tensor, w: Tensor, out: Tensor, around: Around = NOTHING) -> None:
    """out [T, N] = x [T, K] @ w [N, K].T, and what is around it, by a kernel; all on one GPU, rows contiguous."""
    from torchweave.ops.kernels.linear import launch

    if config.norm_apart and around.norm is not None:
        x, around = _normalized(x, around), replace(around, norm=None)
    launch(config, x, w, out, around)


def run_apart(x: Tensor, w: Tensor, around: Around = NOTHING) -> Tensor:
    """x [..., K] times w by the BLAS, and what is around it by operations of their own."""
    if around.norm is not None:
        x = _normalized(x, around)
    y = F.linear(x, w, around.bias)
    if around.activation is not None:
        y = torch.ops.torchweave.gated_activation(y, around.activation)
    return y if around.residual is None else around.residual + y


def _normalized(x: Tensor, around: Around) -> Tensor:
    return torch.ops.torchweave.rms_norm(x, around.norm, around.eps, around.offset, around.wide)


def _chosen(x: Tensor, w: Tensor, around: Around, choices: str) -> Tensor:
    """On a GPU, as the choices say; operands that the kernels cannot read go to the BLAS."""
    width = w.shape[1]
    config = pick(choices, x.numel() // width) if _readable(x, w, around) else None
    if config is None:
        return run_apart(x, w, around)
    outputs = w.shape[0] // 2 if around.activation is not None else w.shape[0]
    out = x.new_empty((*x.shape[:-1], outputs))
    if around.residual is not None:
        around = replace(around, residual=around.residual.view(-1, outputs))
    run(config, x.view(-1, width), w, out.view(-1, outputs), around)
    return out


def linear_into(x: Tensor, w: Tensor, bias: Tensor | None, choices: str, out: Tensor) -> None:
    """out `[..., N]`, contiguous, = `torchweave::linear(x, w, bias, choices)`."""
    rows, result = x.reshape(-1, w.shape[1]), out.view(-1, w.shape[0])
    config = pick(choices, len(rows)) if x.is_cuda and _readable(rows, w, NOTHING) else None
    if config is not None:
        run(config, rows, w, result, Around(bias))
    elif bias is None:
        torch.mm(rows, w.t(), out=result)
    else:
        torch.addmm(bias, rows, w.t(), out=result)


def _readable(x: Tensor, w: Tensor, around: Around) -> bool:
    """May the kernels read these, the weight with 16-byte loads?"""
    rows_aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    beside = around.residual is None or (around.residual.is_contiguous() and around.residual.dtype == x.dtype)
    return x.dtype == w.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 and rows_aligned and beside


def _fake(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "") -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _linear_on_gpu(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "") -> Tensor:
    return _chosen(x, w, Around(bias), choices)


@define("torchweave::linear", fake=_fake, cuda=_linear_on_gpu)
def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "") -> Tensor:
    """x [..., K], w [N, K], bias [N] or none -> [..., N], accumulated in float32 and rounded once."""
    return F.linear(x, w, bias)


def _fake_fused(x: Tensor, w: Tensor, *around: Any) -> Tensor:
    *_, activation, _ = around
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2 if activation is not None else w.shape[0]))


def _fused_on_gpu(x: Tensor, w: Tensor, *around: Any) -> Tensor:
    *fields, choices = around
    return _chosen(x, w, Around(*fields), choices)


@define("torchweave::fused_linear", fake=_fake_fused, cuda=_fused_on_gpu)
def fused_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    offset: float,
    wide: bool,
    residual: Tensor | None,
    activation: str | None,
    choices: str,
) -> Tensor:
    """x [..., K] and w [N, K] with what is around the product (`Around`) -> [..., N], or [..., N // 2] when gated; contiguous."""
    return run_apart(x, w, Around(bias, norm, eps, offset, wide, residual, activation)).contiguous()
