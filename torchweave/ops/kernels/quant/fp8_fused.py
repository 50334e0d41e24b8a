"""Triton: RMSNorm and gated activations with FP8 output. A program owns a token, or part of it where scales allow.

Gated activations with a scale for each token may take two kernels: the scale depends on the whole token. With few, wide tokens
a program per token leaves the GPU idle while one multiprocessor computes 14,336 exponentials and divisions; so one kernel
activates parts of tokens and stores the largest number of each part, and a second kernel divides.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.activation import activate
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.norm import scale_rows
from torchweave.ops.kernels.quant.formats import empty_quantized
from torchweave.ops.kernels.quant.fp8_quant import (
    groups_per_program,
    num_warps_for,
    padded_groups,
    quant_scheme,
    scale_and_store_fp8,
    scale_fp8,
    store_fp8,
    use_pdl,
)
from torchweave.ops.kernels.rows import strided_rows
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2

TWO_KERNEL_MAX_TOKENS = 64
"""With more tokens a program per token fills the GPU, and the traffic between two kernels costs more."""
TWO_KERNEL_MIN_WIDTH = 8192
_PART_ROWS = 8  # groups of 128 channels in a part


@triton.jit(do_not_specialize=["num_tokens"])
def norm_fp8_kernel(
    x, residual, weight, q, s, static_scale, total, num_tokens, eps, offset,
    x_inner, x_outer_stride, x_inner_stride, r_inner, r_outer_stride, r_inner_stride,
    WIDTH: tl.constexpr, SCHEME: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Token `program_id(0)` of q and s = quantized norm of x, or of x + residual, which is also written to `total`."""
    token = tl.program_id(0)
    column = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0) if WEIGHT else 0.0
    pdl_wait(DEPENDENT)
    row = token.to(tl.int64)
    at = row // x_inner * x_outer_stride + row % x_inner * x_inner_stride
    value = tl.load(x + at + column, mask=inside, other=0.0)
    dtype = value.dtype
    if ADD:
        at = row // r_inner * r_outer_stride + row % r_inner * r_inner_stride
        other = tl.load(residual + at + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(total + row * WIDTH + column, value, mask=inside)
    wide = value.to(tl.float32)
    norm = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / WIDTH + eps)
    result = scale_rows(wide, norm, factor, offset, WEIGHT, WIDE, dtype)
    store_fp8(result, inside, column, 0, q, s, static_scale, token, num_tokens, WIDTH, SCHEME, ROWS)


@triton.jit(do_not_specialize=["num_tokens"])
def gated_fp8_kernel(
    gate_up, q, s, static_scale, num_tokens, inner, outer_stride, inner_stride,
    WIDTH: tl.constexpr, SCHEME: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): `ROWS * 128` channels of a token of q and s = quantized `act(gate) * up`."""
    token = tl.program_id(0)
    first_group = tl.program_id(1) * ROWS
    column = (first_group + tl.arange(0, ROWS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    pdl_wait(DEPENDENT)
    row = token.to(tl.int64)
    at = gate_up + row // inner * outer_stride + row % inner * inner_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + WIDTH, mask=inside, other=0.0)
    active = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    result = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    store_fp8(result, inside, column, first_group, q, s, static_scale, token, num_tokens, WIDTH, SCHEME, ROWS)


def launch_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, wide: bool,
    group: int, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(q, s, sum) of `rms_norm_fp8`, or with a residual of `add_rms_norm_fp8`."""
    rows, width = strided_rows(x), x.shape[-1]
    added = rows if residual is None else strided_rows(residual)
    q, s = empty_quantized(x, width, group, scale)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return q, s, total
    whole, dependent = padded_groups(width), use_pdl(x)
    norm_fp8_kernel[(rows.count,)](
        rows.tensor, added.tensor, x if weight is None else weight, q, s, s if scale is None else scale,
        x if total is None else total, rows.count, eps, offset,
        rows.inner, rows.outer_stride, rows.inner_stride, added.inner, added.outer_stride, added.inner_stride,
        WIDTH=width, SCHEME=quant_scheme(group, scale), ROWS=whole,
        ADD=residual is not None, WEIGHT=weight is not None, WIDE=wide, DEPENDENT=dependent,
        num_warps=num_warps_for(whole), enable_fp_fusion=False, **pdl_options(dependent),
    )  # fmt: skip
    return q, s, total


def launch_gated_fp8(gate_up: Tensor, activation: str, group: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(q, s) of `gated_activation_fp8`."""
    if gate_up.numel() and prefers_two_kernels(gate_up, group, scale):
        return launch_gated_parts(gate_up, activation)
    rows, width = strided_rows(gate_up), gate_up.shape[-1] // 2
    q, s = empty_quantized(gate_up, width, group, scale)
    if not gate_up.numel():
        return q, s
    scheme = quant_scheme(group, scale)
    part, dependent = groups_per_program(width, scheme), use_pdl(gate_up)
    gated_fp8_kernel[(rows.count, cdiv(cdiv(width, 128), part))](
        rows.tensor, q, s, s if scale is None else scale, rows.count, rows.inner, rows.outer_stride, rows.inner_stride,
        WIDTH=width, SCHEME=scheme, ROWS=part, ACTIVATION=activation, DEPENDENT=dependent,
        num_warps=num_warps_for(part), enable_fp_fusion=False, **pdl_options(dependent),
    )  # fmt: skip
    return q, s


@triton.jit
def gated_part_kernel(
    gate_up, active, largest, parts, inner, outer_stride, inner_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a part of `active [T, WIDTH]` = `act(gate) * up`, and its largest size in `largest [T, parts]`."""
    column = tl.program_id(1) * (ROWS * 128) + tl.arange(0, ROWS * 128)
    inside = column < WIDTH
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = gate_up + row // inner * outer_stride + row % inner * inner_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + WIDTH, mask=inside, other=0.0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    result = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(active + row * WIDTH + column, result, mask=inside)
    size = tl.max(tl.where(inside, tl.abs(result.to(tl.float32)), 0.0), 0)
    tl.store(largest + row * parts + tl.program_id(1), size)


@triton.jit
def quant_part_kernel(
    active, largest, q, s, parts,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a part of q [T, WIDTH] = `active` over its token's scale, which the first program writes to s [T]."""
    column = tl.program_id(1) * (ROWS * 128) + tl.arange(0, ROWS * 128)
    inside, part = column < WIDTH, tl.arange(0, PARTS)
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    one = scale_fp8(tl.max(tl.load(largest + row * parts + part, mask=part < parts, other=0.0), 0))
    tl.store(s + row, one, mask=tl.program_id(1) == 0)
    values = tl.load(active + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scale_and_store_fp8(values, one, inside, q + row * WIDTH + column)


def prefers_two_kernels(gate_up: Tensor, group: int, scale: Tensor | None) -> bool:
    """Whether `launch_gated_parts` is faster than one kernel."""
    width = gate_up.shape[-1] // 2
    return (
        group == 0
        and scale is None
        and width >= TWO_KERNEL_MIN_WIDTH
        and gate_up.numel() <= TWO_KERNEL_MAX_TOKENS * gate_up.shape[-1]
    )


def launch_gated_parts(gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`gated_activation_fp8` with a scale for each token; gate_up is not empty."""
    rows, width = strided_rows(gate_up), gate_up.shape[-1] // 2
    q, s = empty_quantized(gate_up, width, 0, None)
    parts, dependent = cdiv(width, _PART_ROWS * 128), use_pdl(gate_up)
    active = torch.empty(rows.count, width, dtype=gate_up.dtype, device=gate_up.device)
    largest = torch.empty(rows.count, parts, dtype=torch.float32, device=gate_up.device)
    how = {
        "WIDTH": width,
        "ROWS": _PART_ROWS,
        "DEPENDENT": dependent,
        "num_warps": num_warps_for(_PART_ROWS),
        **pdl_options(dependent),
    }
    gated_part_kernel[(rows.count, parts)](
        rows.tensor, active, largest, parts, rows.inner, rows.outer_stride, rows.inner_stride,
        ACTIVATION=activation, enable_fp_fusion=False, **how,
    )  # fmt: skip
    quant_part_kernel[(rows.count, parts)](active, largest, q, s, parts, PARTS=next_power_of_2(parts), **how)
    return q, s
