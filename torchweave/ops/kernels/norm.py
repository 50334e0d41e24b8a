"""Triton: RMSNorm of rows, with an optional residual add before it or gate after it. A program holds whole rows in registers."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.activation import activate
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_prefetch, pdl_wait, supports_pdl
from torchweave.ops.kernels.rows import strided_rows
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def scale_rows(rows, norm, weight, offset, WEIGHT: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr):
    """float32 rows scaled by their norm `[ROWS, 1]` and the weight `[1, N]`, rounded to `dtype` where the dialect rounds."""
    rows = rows * norm
    if WEIGHT:
        weight = weight.to(tl.float32)
        rows = rows * (weight + offset) if WIDE else rows.to(dtype).to(tl.float32) * weight
    return rows.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, other, weight, y, total, num_rows, eps, offset,
    x_inner, x_outer_stride, x_inner_stride, other_inner, other_outer_stride, other_inner_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, STORE_SUM: tl.constexpr, WEIGHT: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [num_rows, WIDTH] = norm of x; ADD: of x + other, also written to `total` if STORE_SUM; ACTIVATION: times the activation
    of other. x and other are `StridedRows`."""
    if WEIGHT:
        LINES: tl.constexpr = (BLOCK + 63) // 64
        if tl.program_id(0) == 0:
            pdl_prefetch(weight + tl.minimum(tl.arange(0, LINES) * 64, WIDTH - 1), DEPENDENT)
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    at = row // x_inner * x_outer_stride + row % x_inner * x_inner_stride
    value = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0)
    dtype = value.dtype
    # In the layout of the rows and before their sum, so that no thread waits for it after the sum.
    place = weight + (row * 0)[:, None] + column[None, :]
    scale = tl.load(place, mask=mask, other=0.0) if WEIGHT else 0.0
    target = row[:, None] * WIDTH + column[None, :]
    if ADD or ACTIVATION is not None:
        at = row // other_inner * other_outer_stride + row % other_inner * other_inner_stride
        second = tl.load(other + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value = (value.to(tl.float32) + second).to(dtype)
        if STORE_SUM:
            tl.store(total + target, value, mask=mask)
    wide = value.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    result = scale_rows(wide, norm[:, None], scale, offset, WEIGHT, WIDE, dtype)
    if ACTIVATION is not None:
        result *= activate(second, ACTIVATION)
    tl.store(y + target, result.to(dtype), mask=mask)


def launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    wide: bool,
    keep_sum: bool = True,
    *,
    gate: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The norm of x, or of x + residual, and that sum if it is requested; or the norm of x times the activation of `gate`."""
    assert residual is None or gate is None, "a norm has a residual or a gate"
    other = gate if residual is None else residual
    rows = strided_rows(x)
    others = rows if other is None else strided_rows(other)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    keep = residual is not None and keep_sum
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep else None
    if not x.numel():
        return y, total
    width, dependent = x.shape[-1], supports_pdl(x.device)
    block = next_power_of_2(width)
    rows_per_program = max(1, min(2048 // block, next_power_of_2(rows.count)))
    norm_kernel[(cdiv(rows.count, rows_per_program),)](
        rows.tensor, others.tensor, x if weight is None else weight, y, y if total is None else total,
        rows.count, eps, offset,
        rows.inner, rows.outer_stride, rows.inner_stride, others.inner, others.outer_stride, others.inner_stride,
        WIDTH=width, BLOCK=block, ROWS=rows_per_program,
        ADD=residual is not None, STORE_SUM=keep, WEIGHT=weight is not None, WIDE=wide, ACTIVATION=activation,
        DEPENDENT=dependent, num_warps=max(1, min(16, block * rows_per_program // 256)), enable_fp_fusion=False,
        **pdl_options(dependent),
    )  # fmt: skip
    return y, total
