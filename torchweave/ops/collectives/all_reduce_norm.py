"""All-reduce with what follows it in a decoder layer: the residual add, the RMSNorm, and quantising for the next product.

Each op is, to the bit, its parts one after the other: the sum over ranks is rounded to x's dtype, the residual is added and
rounded, the norm rounds as its dialect says (`torchweave.ops.norm`), and that is quantised (`torchweave.ops.quant.fp8`,
`.fp4`). Where
the group's communicator has a kernel for all of it, and the size is one where it measured faster, that runs; else the parts do.

An output that nobody reads is not computed: `keep_norm` and `keep_sum` say so, and it is an empty tensor of shape `[0]`.
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
    """The norm of x summed over ranks, by one kernel where there is one for this size, else part by part."""
    fused = comm.fused_all_reduce_norm(x, norm)
    return fused if fused is not None else apply_norm(comm.all_reduce(x), norm)


def apply_norm(x: Tensor, norm: NormSpec) -> NormOutput:
    """What follows the sum over ranks, by the ops of one GPU; x is not kept by anyone else."""
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
    """Room for the results; the fakes' shapes."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm.keep_norm or norm.quant is None else None
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm.keep_sum else None
    if norm.quant is None:
        return NormOutput(y, total)
    if norm.quant.to == "fp4":
        return NormOutput(y, total, *empty_fp4(x))
    return NormOutput(y, total, *empty_quantized(x, x.shape[-1], norm.quant.group, norm.quant.scale))


def two_outputs(x: Tensor, normed: NormOutput, norm: NormSpec) -> tuple[Tensor, Tensor]:
    """What an op without quantising returns."""
    assert normed.y is not None
    return normed.y, _or_empty(normed.total, norm.keep_sum, x)


def four_outputs(x: Tensor, normed: NormOutput, norm: NormSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What an op with quantising returns."""
    assert normed.q is not None and normed.s is not None
    y, total = _or_empty(normed.y, norm.keep_norm, x), _or_empty(normed.total, norm.keep_sum, x)
    return normed.q, normed.s, y, total


def _or_empty(result: Tensor | None, kept: bool, x: Tensor) -> Tensor:
    return result if kept and result is not None else torch.empty(0, dtype=x.dtype, device=x.device)


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
