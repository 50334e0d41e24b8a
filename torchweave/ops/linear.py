"""Linears that read their weight at full bandwidth when there are few tokens, alone and fused with neighboring ops.

`torchweave::linear` is F.linear, and may multiply its input and output by constants. `torchweave::fused_linear` also normalizes
its input, gates half of its output by the other half, or adds a residual: the ops between two products of a decoder layer. The
number of tokens is symbolic in the captured graph but known when an op runs, which is when a CUDA graph is recorded: so the op,
not the compiler, selects the BLAS or a kernel of the project for each bucket, by its argument `choices` (`linear_config`).
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
SCALING = ("input_factor", "factors", "factor", "begin", "end")
"""Fields of a fusion that are the last arguments of `torchweave::linear`, and stand after `choices` in `fused_linear`."""


def run(config: LinearConfig, x: Tensor, w: Tensor, out: Tensor, fusion: LinearFusion = NO_FUSION) -> None:
    """out [T, N] = x [T, K] @ w [N, K].T and the fusion, by a kernel; all on one GPU, rows contiguous."""
    from torchweave.ops.kernels.linear import launch

    apart = config.kernel != "row" and fusion.input_factor != 1.0
    if (config.norm_apart or apart) and fusion.norm is not None:
        x, fusion = _normalized(x, fusion), replace(fusion, norm=None)
    if apart:
        x, fusion = x * fusion.input_factor, replace(fusion, input_factor=1.0)
    launch(config, x, w, out, fusion)


def run_unfused(x: Tensor, w: Tensor, fusion: LinearFusion = NO_FUSION) -> Tensor:
    """x [..., K] times w by the BLAS, and the fusion by separate ops."""
    if fusion.norm is not None:
        x = _normalized(x, fusion)
    if fusion.input_factor != 1.0:
        x = x * fusion.input_factor
    y = F.linear(x, w, fusion.bias)
    if fusion.factors is not None:
        y = y.mul_(fusion.factors)
    elif fusion.factor != 1.0:
        y[..., fusion.begin : fusion.end or None].mul_(fusion.factor)
    if fusion.activation is not None:
        y = torch.ops.torchweave.gated_activation(y, fusion.activation)
    if fusion.addend is not None:
        y = fusion.addend + y
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
        addend = None if fusion.addend is None else fusion.addend.view(-1, outputs)
        fusion = replace(fusion, residual=fusion.residual.view(-1, outputs), addend=addend)
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
    """Whether the kernels can read the operands, the weight with 16-byte loads, and the norm's weight in words of two."""
    rows_aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    added = (each for each in (fusion.residual, fusion.addend) if each is not None)
    residual_fits = all(each.is_contiguous() and each.dtype == x.dtype for each in added)
    norm_aligned = fusion.norm is None or fusion.norm.data_ptr() % 4 == 0
    read_whole = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x.dtype == w.dtype and read_whole and rows_aligned and norm_aligned and residual_fits


def _fake(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _linear_on_gpu(x: Tensor, w: Tensor, bias: Tensor | None = None, choices: str = "", *scaling: Any) -> Tensor:
    return _run_chosen(x, w, LinearFusion(bias, **dict(zip(SCALING, scaling, strict=False))), choices)


@define("torchweave::linear", fake=_fake, cuda=_linear_on_gpu)
def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    choices: str = "",
    input_factor: float = 1.0,
    factors: Tensor | None = None,
    factor: float = 1.0,
    begin: int = 0,
    end: int = 0,
) -> Tensor:
    """x [..., K], w [N, K], bias [N] or none -> [..., N], accumulated in float32 and rounded once; then multiplied, and rounded
    again, by factors or the factor (`LinearFusion`)."""
    fusion = LinearFusion(bias, input_factor=input_factor, factors=factors, factor=factor, begin=begin, end=end)
    return run_unfused(x, w, fusion)


def _fake_fused(x: Tensor, w: Tensor, *fusion: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2 if fusion[6] is not None else w.shape[0]))


def _fused_on_gpu(x: Tensor, w: Tensor, *fusion: Any) -> Tensor:
    return _run_chosen(x, w, LinearFusion(*fusion[:7], *fusion[8:]), fusion[7])


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
    input_factor: float = 1.0,
    factors: Tensor | None = None,
    factor: float = 1.0,
    begin: int = 0,
    end: int = 0,
    addend: Tensor | None = None,
) -> Tensor:
    """x [..., K] and w [N, K] with the fusion (`LinearFusion`) -> [..., N], or [..., N // 2] when gated; contiguous."""
    around = (bias, norm, eps, offset, wide, residual, activation)
    fusion = LinearFusion(*around, input_factor, factors, factor, begin, end, addend)
    return run_unfused(x, w, fusion).contiguous()


def _linear_gelu_on_gpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """By cuBLASLt's epilogue."""
    rows = torch.ops.aten._addmm_activation.default(bias, x.reshape(-1, w.shape[1]), w.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], w.shape[0])


def _fake_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@define("torchweave::linear_gelu", fake=_fake_gelu, cuda=_linear_gelu_on_gpu)
def linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh formula) of x [..., K] @ w [N, K].T + bias [N] -> [..., N], contiguous; on a GPU rounded once, after the GELU."""
    return F.gelu(F.linear(x, w, bias), approximate="tanh").contiguous()
