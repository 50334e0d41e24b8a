"""Collectives fused with the producer of their operand, which writes it into symmetric memory ("user buffers").

A collective over symmetric memory first copies its operand there, unless the producer writes it there. That memory is reused,
and a compiler that holds a tensor of it could pass it to another kernel while other ranks still read. So no graph holds that
tensor: the producer and the collective are one op:

    producer      operands                          the operand of the collective
    copy          x                                 x
    add           a, b                              a + b
    linear        x, w[, bias]                      torchweave::linear(x, w, bias, choices)
    fp8_linear    q, x_scale, w, w_scale[, bias]    torchweave::fp8_linear(..., dtype)

Where the communicator has no buffer for a size (torch.distributed, many tokens), the operand is an ordinary tensor.

`slot` is the part of that memory: other ranks may still read the operand of a collective while the next operand is written, so
consecutive collectives differ; see `Communicator.buffer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import (
    NormSpec,
    QuantSpec,
    empty_norm_output,
    four_outputs,
    fused_all_reduce_norm,
    two_outputs,
)
from torchweave.ops.collectives.op import communicator
from torchweave.ops.linear import linear_into
from torchweave.ops.quant.fp8_linear import fp8_linear_into
from torchweave.ops.registry import define

PRODUCERS = ("copy", "add", "linear", "fp8_linear")


def produce_operand(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int, group: str
) -> Tensor:
    """The operand of a collective, in symmetric memory if the communicator has a buffer for it."""
    first = operands[0]
    shape = operand_shape(producer, operands)
    buffer = communicator(group).buffer(shape, dtype, slot)
    out = torch.empty(shape, dtype=dtype, device=first.device) if buffer is None else buffer
    if producer == "linear":
        x, w, *bias = operands
        linear_into(x, w, bias[0] if bias else None, choices, out)
    elif producer == "fp8_linear":
        q, x_scale, w, w_scale, *bias = operands
        fp8_linear_into(q, x_scale, w, w_scale, bias[0] if bias else None, out)
    elif producer == "add":
        torch.add(first, operands[1], out=out)
    else:
        out.copy_(first)
    return out


def operand_shape(producer: str, operands: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of a producer's output.

    Raises:
        ValueError: the producer is unknown.
    """
    if producer not in PRODUCERS:
        raise ValueError(f"producer {producer!r} is unknown; expected {', '.join(PRODUCERS)}.")
    weight = {"linear": 1, "fp8_linear": 2}.get(producer)
    first = operands[0].shape
    return tuple(first) if weight is None else (*first[:-1], operands[weight].shape[0])


def _fake_operand(producer: str, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.empty(operand_shape(producer, operands), dtype=dtype, device=operands[0].device)


def _fake(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int, group: str
) -> Tensor:  # fmt: skip
    return _fake_operand(producer, operands, dtype)


@define("torchweave::buffered_all_reduce", fake=_fake)
def buffered_all_reduce(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int, group: str
) -> Tensor:
    """`torchweave::all_reduce` of the producer's output, of `dtype`."""
    return communicator(group).all_reduce(produce_operand(producer, operands, choices, dtype, slot, group))


def _fake_norm(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norm, x = NormSpec(residual, weight, eps, offset, wide, keep_sum=keep_sum), _fake_operand(producer, operands, dtype)
    return two_outputs(x, empty_norm_output(x, norm), norm)


@define("torchweave::buffered_all_reduce_add_rms_norm", fake=_fake_norm)
def buffered_all_reduce_add_rms_norm(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`torchweave::all_reduce_add_rms_norm` of the producer's output."""
    norm, x = (
        NormSpec(residual, weight, eps, offset, wide, keep_sum=keep_sum),
        produce_operand(producer, operands, choices, dtype, slot, group),
    )
    return two_outputs(x, fused_all_reduce_norm(communicator(group), x, norm), norm)


def _fake_norm_fp8(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    quant_group: int, scale: Tensor | None,
    keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, quant = _fake_operand(producer, operands, dtype), QuantSpec("fp8", quant_group, scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, empty_norm_output(x, norm), norm)


@define("torchweave::buffered_all_reduce_add_rms_norm_fp8", fake=_fake_norm_fp8)
def buffered_all_reduce_add_rms_norm_fp8(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    quant_group: int, scale: Tensor | None,
    keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`torchweave::all_reduce_add_rms_norm_fp8` of the producer's output."""
    x, quant = produce_operand(producer, operands, choices, dtype, slot, group), QuantSpec("fp8", quant_group, scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, fused_all_reduce_norm(communicator(group), x, norm), norm)


def _fake_norm_fp4(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool, scale: Tensor,
    keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, quant = _fake_operand(producer, operands, dtype), QuantSpec("fp4", scale=scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, empty_norm_output(x, norm), norm)


@define("torchweave::buffered_all_reduce_add_rms_norm_fp4", fake=_fake_norm_fp4)
def buffered_all_reduce_add_rms_norm_fp4(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool, scale: Tensor,
    keep_norm: bool, keep_sum: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`torchweave::all_reduce_add_rms_norm_fp4` of the producer's output."""
    x, quant = produce_operand(producer, operands, choices, dtype, slot, group), QuantSpec("fp4", scale=scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, fused_all_reduce_norm(communicator(group), x, norm), norm)
