"""Linears that read their weight at full bandwidth when there are few tokens, alone and fused with neighbouring ops.

`torchweave::linear` is F.linear. `torchweave::fused_linear` also normalises its input, gates half of its output by the other
half, or adds a residual: the ops between two products of a decoder layer. The number of tokens is symbolic in the captured
graph but known when an op runs, which is when a CUDA graph is recorded: so the op, not the compiler, selects the BLAS or a
kernel of the project for each bucket, by its argument `choices` (`linear_config`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops import activation as _activation  # noqa: F401 (registers the ops that stand around a product)
from torchweave.ops import norm as _norm  # noqa: F401
from torchweave.ops.linear_config import LinearConfig, LinearFusion, select_config
from torchweave.ops.registry import define

NO_FUSION = LinearFusion()


def run(config: LinearConfig, x: Tensor, w: Tensor, out: Tensor, fusion: LinearFusion = NO_FUSION) -> None:
    """out [T, N] = x [T, K] @ w [N, K].T and the fusion, by a kernel; all on one GPU, rows contiguous."""
    from torchweave.ops.kernels.linear import launch

    if config.norm_apart and fusion.norm is not None:
        x, fusion = _normalized(x, fusion), replace(fusion, norm=None)
    launch(config, x, w, out, fusion)


def run_unfused(x: Tensor, w: Tensor, fusion: LinearFusion = NO_FUSION) -> Tensor:
    """x [..., K] times w by the BLAS, and the fusion by separate ops."""
    if fusion.norm is not None:
        x = _normalized(x, fusion)
    y = F.linear(x, w, fusion.bias)
    if fusion.activation is not None:
        y = torch.ops.torchweave.gated_activation(y, fusion.activation)
    return y if fusion.residual is None else fusion.residual + y


def _normalized(x: Tensor, fusion: LinearFusion) -> Tensor:
    return torch.ops.torchweave.rms_norm(x, fusion.norm, fusion.eps, fusion.offset, fusion.wide)


def _run_chosen(x: Tensor, w: Tensor, fusion: LinearFusion, choices: str) -> Tensor:
    """Run on a GPU by `choices`; operands that the kernels cannot read go to the BLAS."""
    width = w.shape[1]
    config = select_config(choices, x.numel() // width) if _kernels_can_read(x, w, fusion) else None
    if config is None:
        return run_unfused(x, w, fusion)
    outputs = w.shape[0] // 2 if fusion.activation is not None else w.shape[0]
    out = x.new_empty((*x.shape[:-1], outputs))
    if fusion.residual is not None:
        fusion = replace(fusion, residual=fusion.residual.view(-1, outputs))
    run(config, x.view(-1, width), w, out.view(-1, outputs), fusion)
    return out


def linear_into(x: Tensor, w: Tensor, bias: Tensor | None, choices: str, out: Tensor) -> None:
    """out `[..., N]`, contiguous, = `torchweave::linear(x, w, bias, choices)`."""
    rows, result = x.reshape(-1, w.shape[1]), out.view(-1, w.shape[0])
    config = select_config(choices, len(rows)) if x.is_cuda and _kernels_can_read(rows, w, NO_FUSION) else None
    if config is not None:
        run(config, rows, w, result, LinearFusion(bias))
    elif bias is None:
        torch.mm(rows, w.t(), out=result)
    else:
        torch.addmm(bias, rows, w.t(), out=result)


def _kernels_can_read(x: Tensor, w: Tensor, fusion: LinearFusion) -> bool:
    """Whether the kernels can read the operands, the weight with 16-byte loads."""
    rows_aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    residual_fits = fusion.residual is None or (fusion.residual.is_contiguous() and fusion.residual.dtype == x.dtype)
    return x.dtype == w.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 and rows_aligned and residual_fits


def _fake(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "") -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _linear_on_gpu(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "") -> Tensor:
    return _run_chosen(x, w, LinearFusion(bias), choices)


@define("torchweave::linear", fake=_fake, cuda=_linear_on_gpu)
def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "") -> Tensor:
    """x [..., K], w [N, K], bias [N] or none -> [..., N], accumulated in float32 and rounded once."""
    return F.linear(x, w, bias)


def _fake_fused(x: Tensor, w: Tensor, *fusion: Any) -> Tensor:
    *_, activation, _ = fusion
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2 if activation is not None else w.shape[0]))


def _fused_on_gpu(x: Tensor, w: Tensor, *fusion: Any) -> Tensor:
    *fields, choices = fusion
    return _run_chosen(x, w, LinearFusion(*fields), choices)


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
    """x [..., K] and w [N, K] with the fusion (`LinearFusion`) -> [..., N], or [..., N // 2] when gated; contiguous."""
    return run_unfused(x, w, LinearFusion(bias, norm, eps, offset, wide, residual, activation)).contiguous()


def _linear_gelu_on_gpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """By cuBLASLt's epilogue."""
    rows = torch.ops.aten._addmm_activation.default(bias, x.reshape(-1, w.shape[1]), w.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], w.shape[0])


def _fake_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@define("torchweave::linear_gelu", fake=_fake_gelu, cuda=_linear_gelu_on_gpu)
def linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh formula) of x [..., K] @ w [N, K].T + bias [N] -> [..., N], contiguous; on a GPU rounded once, behind the GELU."""
    return F.gelu(F.linear(x, w, bias), approximate="tanh").contiguous()
