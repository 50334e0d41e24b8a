"""All-reduce fused with the residual add, the RMSNorm and the quantization after it in a decoder layer.

Each op is bit-equal to its parts in sequence: the sum over ranks is rounded to x's dtype, the residual is added and rounded,
the norm rounds by its dialect (`torchweave.ops.norm`), and is quantized (`torchweave.ops.quant.fp8`, `.nvfp4`). The
communicator's fused kernel runs at the sizes where it measured faster; else the separate ops run.

Outputs without readers are not computed: with `keep_norm` or `keep_sum` false they are empty tensors of shape `[0]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.collectives.op import Communicator, communicator
from torchweave.ops.kernels.collectives.workspace import NormOutput, NormSpec, QuantSpec
from torchweave.ops.norm import add_rms_norm, rms_norm, rms_norm_of_sum
from torchweave.ops.quant.fp8 import empty_quantized, fp8_quant
from torchweave.ops.quant.fp8_fused import add_rms_norm_fp8, rms_norm_fp8
from torchweave.ops.quant.nvfp4 import empty_fp4, fp4_quant
from torchweave.ops.registry import define


def fused_all_reduce_norm(comm: Communicator, x: Tensor, norm: NormSpec) -> NormOutput:
    """The norm of x summed over ranks, by a fused kernel if there is one for this size, else by separate ops."""
    fused = comm.fused_all_reduce_norm(x, norm)
    return fused if fused is not None else apply_norm(comm.all_reduce(x), norm)


def apply_norm(x: Tensor, norm: NormSpec) -> NormOutput:
    """`norm` of the reduced x by ops of one GPU; the caller keeps no reference to x."""
    dialect = (norm.weight, norm.eps, norm.offset, norm.wide)
    quant = norm.quant
    if quant is not None and quant.to == "fp8" and not norm.keep_norm:
        if norm.residual is None:
            return NormOutput(None, x, *rms_norm_fp8(x, *dialect, quant.group, quant.scale))
        q, s, total = add_rms_norm_fp8(x, norm.residual, *dialect, quant.group, quant.scale)
        return NormOutput(None, total, q, s)
    if norm.residual is None:
        y, total = rms_norm(x, *dialect), x
    elif norm.keep_sum:
        y, total = add_rms_norm(x, norm.residual, *dialect)
    else:
        y, total = rms_norm_of_sum(x, norm.residual, *dialect), None
    if quant is None:
        return NormOutput(y, total)
    return NormOutput(y, total, *quantize_norm(y, quant))


def quantize_norm(y: Tensor, quant: QuantSpec) -> tuple[Tensor, Tensor]:
    """q and s of y."""
    if quant.to == "fp8":
        return fp8_quant(y, quant.group, quant.scale)
    assert quant.scale is not None, "FP4 has a scale for the tensor"
    return fp4_quant(y, quant.scale)


def empty_norm_output(x: Tensor, norm: NormSpec) -> NormOutput:
    """Empty tensors for the results; the shapes of the fakes."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm.keep_norm or norm.quant is None else None
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm.keep_sum else None
    if norm.quant is None:
        return NormOutput(y, total)
    if norm.quant.to == "fp4":
        return NormOutput(y, total, *empty_fp4(x))
    return NormOutput(y, total, *empty_quantized(x, x.shape[-1], norm.quant.group, norm.quant.scale))


def two_outputs(x: Tensor, normed: NormOutput, norm: NormSpec) -> tuple[Tensor, Tensor]:
    """Outputs of an op without quantization."""
    assert normed.y is not None
    return normed.y, _or_empty(normed.total, norm.keep_sum, x)


def four_outputs(x: Tensor, normed: NormOutput, norm: NormSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs of an op with quantization."""
    assert normed.q is not None and normed.s is not None
    y, total = _or_empty(normed.y, norm.keep_norm, x), _or_empty(normed.total, norm.keep_sum, x)
    return normed.q, normed.s, y, total


def _or_empty(result: Tensor | None, keep: bool, x: Tensor) -> Tensor:
    return result if keep and result is not None else torch.empty(0, dtype=x.dtype, device=x.device)


def _fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool, keep_sum: bool,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norm = NormSpec(residual, weight, eps, offset, wide, keep_sum=keep_sum)
    return two_outputs(x, empty_norm_output(x, norm), norm)


@define("torchweave::all_reduce_add_rms_norm", fake=_fake)
def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool, keep_sum: bool,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`y, total = add_rms_norm(all_reduce(x, group), residual, weight, eps, offset, wide)`; see `NormSpec`."""
    norm = NormSpec(residual, weight, eps, offset, wide, keep_sum=keep_sum)
    return two_outputs(x, fused_all_reduce_norm(communicator(group), x.contiguous(), norm), norm)


def _fake_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    quant_group: int, scale: Tensor | None, keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = NormSpec(residual, weight, eps, offset, wide, QuantSpec("fp8", quant_group, scale), keep_norm, keep_sum)
    return four_outputs(x, empty_norm_output(x, norm), norm)


@define("torchweave::all_reduce_add_rms_norm_fp8", fake=_fake_fp8)
def all_reduce_add_rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    quant_group: int, scale: Tensor | None, keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(q, s, y, total)`: as `all_reduce_add_rms_norm`, and `q, s = fp8_quant(y, quant_group, scale)`."""
    norm = NormSpec(residual, weight, eps, offset, wide, QuantSpec("fp8", quant_group, scale), keep_norm, keep_sum)
    return four_outputs(x, fused_all_reduce_norm(communicator(group), x.contiguous(), norm), norm)


def _fake_fp4(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    scale: Tensor, keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = NormSpec(residual, weight, eps, offset, wide, QuantSpec("fp4", scale=scale), keep_norm, keep_sum)
    return four_outputs(x, empty_norm_output(x, norm), norm)


@define("torchweave::all_reduce_add_rms_norm_fp4", fake=_fake_fp4)
def all_reduce_add_rms_norm_fp4(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    scale: Tensor, keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(q, s, y, total)`: as `all_reduce_add_rms_norm`, and `q, s = fp4_quant(y, scale)`."""
    norm = NormSpec(residual, weight, eps, offset, wide, QuantSpec("fp4", scale=scale), keep_norm, keep_sum)
    return four_outputs(x, fused_all_reduce_norm(communicator(group), x.contiguous(), norm), norm)
