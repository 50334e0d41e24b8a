"""Collectives whose operand is made where they read it: in memory that all ranks see ("user buffers").

A collective over symmetric memory first copies its operand there, unless whoever makes the operand writes it there. Such memory is
used again and again, and a compiler that sees a tensor of it may do so too early: it would hand it to a kernel of its own while
other ranks still read. So a graph never holds one. What makes the operand and the collective are one op:

    producer      operands                          the operand of the collective
    copy          x                                 x
    add           a, b                              a + b
    linear        x, w[, bias]                      torchweave::linear(x, w, bias, choices)
    fp8_linear    q, x_scale, w, w_scale[, bias]    torchweave::fp8_linear(..., dtype)

Where the communicator has no room for a size (torch.distributed, many tokens), the operand is a tensor like any other.

`slot` says which part of that memory: a collective that has begun on one rank may still be read by another one while the next is
made, so neighbours differ; see `Communicator.buffer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import (
    NormOutput,
    NormSpec,
    QuantSpec,
    empty_norm_output,
    four_outputs,
    fused_all_reduce_norm,
    two_outputs,
)
from torchweave.ops.collectives.op import communicator
from torchweave.ops.collectives.sequence_parallel_norm import RowSharding, row_sharded_norm
from torchweave.ops.linear import linear_into
from torchweave.ops.quant.fp8_linear import fp8_linear_into
from torchweave.ops.registry import define

PRODUCERS = ("copy", "add", "linear", "fp8_linear")


def produce_operand(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int, group: str
) -> Tensor:
    """The operand of a collective, in symmetric memory where there is room for it."""
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
    """The shape of what a producer makes.

    Raises:
        ValueError: there is no such producer.
    """
    if producer not in PRODUCERS:
        raise ValueError(f"nothing produces an operand by {producer!r}; expected {', '.join(PRODUCERS)}.")
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
    """`torchweave::all_reduce` of what the producer makes, of `dtype`."""
    return communicator(group).all_reduce(produce_operand(producer, operands, choices, dtype, slot, group))


def _normed(x: Tensor, norm: NormSpec, sharding: RowSharding) -> NormOutput:
    if sharding.residual or sharding.total:
        return row_sharded_norm(x, norm, sharding)
    return fused_all_reduce_norm(communicator(sharding.group), x, norm)


def _empty(x: Tensor, norm: NormSpec, sharding: RowSharding) -> NormOutput:
    empty = empty_norm_output(x, norm)
    if not (sharding.total and norm.keep_sum):
        return empty
    return empty._replace(total=torch.empty_like(_rows(x, sharding.group)))


def _rows(x: Tensor, group: str) -> Tensor:
    return torch.ops.torchweave.own_rows(x, group)


def _fake_norm(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    keep_sum: bool, residual_rows: bool, sum_rows: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norm, x = NormSpec(residual, weight, eps, offset, wide, keep_sum=keep_sum), _fake_operand(producer, operands, dtype)
    return two_outputs(x, _empty(x, norm, RowSharding(group, residual_rows, sum_rows)), norm)


@define("torchweave::buffered_all_reduce_add_rms_norm", fake=_fake_norm)
def buffered_all_reduce_add_rms_norm(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    keep_sum: bool, residual_rows: bool, sum_rows: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`torchweave::all_reduce_add_rms_norm` of what the producer makes; see `RowSharding` for the rows."""
    norm, x = (
        NormSpec(residual, weight, eps, offset, wide, keep_sum=keep_sum),
        produce_operand(producer, operands, choices, dtype, slot, group),
    )
    return two_outputs(x, _normed(x, norm, RowSharding(group, residual_rows, sum_rows)), norm)


def _fake_norm_fp8(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    quant_group: int, scale: Tensor | None,
    keep_norm: bool, keep_sum: bool, residual_rows: bool, sum_rows: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, quant = _fake_operand(producer, operands, dtype), QuantSpec("fp8", quant_group, scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, _empty(x, norm, RowSharding(group, residual_rows, sum_rows)), norm)


@define("torchweave::buffered_all_reduce_add_rms_norm_fp8", fake=_fake_norm_fp8)
def buffered_all_reduce_add_rms_norm_fp8(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    quant_group: int, scale: Tensor | None,
    keep_norm: bool, keep_sum: bool, residual_rows: bool, sum_rows: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`torchweave::all_reduce_add_rms_norm_fp8` of what the producer makes; see `RowSharding` for the rows."""
    x, quant = produce_operand(producer, operands, choices, dtype, slot, group), QuantSpec("fp8", quant_group, scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, _normed(x, norm, RowSharding(group, residual_rows, sum_rows)), norm)


def _fake_norm_fp4(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool, scale: Tensor,
    keep_norm: bool, keep_sum: bool, residual_rows: bool, sum_rows: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, quant = _fake_operand(producer, operands, dtype), QuantSpec("fp4", scale=scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, _empty(x, norm, RowSharding(group, residual_rows, sum_rows)), norm)


@define("torchweave::buffered_all_reduce_add_rms_norm_fp4", fake=_fake_norm_fp4)
def buffered_all_reduce_add_rms_norm_fp4(
    producer: str, operands: Sequence[Tensor], choices: str, dtype: torch.dtype, slot: int,
    residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool, scale: Tensor,
    keep_norm: bool, keep_sum: bool, residual_rows: bool, sum_rows: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`torchweave::all_reduce_add_rms_norm_fp4` of what the producer makes; see `RowSharding` for the rows."""
    x, quant = produce_operand(producer, operands, choices, dtype, slot, group), QuantSpec("fp4", scale=scale)
    norm = NormSpec(residual, weight, eps, offset, wide, quant, keep_norm, keep_sum)
    return four_outputs(x, _normed(x, norm, RowSharding(group, residual_rows, sum_rows)), norm)
