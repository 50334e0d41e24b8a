"""Triton: quantization to e4m3; a token is read once. The other kernels with FP8 output share `store_fp8`.

A token is held in registers as `[ROWS, 128]`, so that a scale over 128 channels is a reduction over one axis.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.quant.formats import empty_quantized
from torchweave.ops.kernels.rows import strided_rows
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2

PDL_MAX_TOKENS = 2
"""Up to this many tokens kernels with FP8 output use dependent launch, as the products that read them do."""
FP8_MAX: tl.constexpr = tl.constexpr(448.0)
MIN_AMAX: tl.constexpr = tl.constexpr(1e-10)


@triton.jit
def scale_fp8(size):
    """The scale of numbers whose largest absolute value is `size`."""
    return tl.div_rn(tl.maximum(size, MIN_AMAX), FP8_MAX)


@triton.jit
def scale_and_store_fp8(values, divisor, inside, at):
    """Round float32 `values` over `divisor` and store them."""
    scaled = tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    scaled = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(at, scaled.to(at.dtype.element_ty), mask=inside)


@triton.jit
def store_fp8(
    values, inside, column, first_group, q, s, static_scale, token, num_tokens,
    WIDTH: tl.constexpr, SCHEME: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize float32 `values [ROWS, 128]`, valid where `inside`, into row `token` of q and s. SCHEME: see `quant_scheme`."""
    if SCHEME == 0:
        one = tl.load(static_scale)
        tl.store(s, one, mask=(token == 0) & (first_group == 0))
        divisor = tl.full([ROWS, 1], 1.0, tl.float32) * one
    else:
        size = tl.max(tl.where(inside, tl.abs(values), 0.0), 1)
        if SCHEME == 1:
            one = scale_fp8(tl.max(size, 0))
            tl.store(s + token, one)
            divisor = tl.full([ROWS, 1], 1.0, tl.float32) * one
        else:
            each = scale_fp8(size)
            group = first_group + tl.arange(0, ROWS)
            tl.store(s + group.to(tl.int64) * num_tokens + token, each, mask=group < (WIDTH + 127) // 128)
            divisor = each[:, None]
    scale_and_store_fp8(values, divisor, inside, q + token.to(tl.int64) * WIDTH + column)


@triton.jit(do_not_specialize=["num_tokens"])
def quant_kernel(
    x, q, s, static_scale, num_tokens, x_inner, x_outer_stride, x_inner_stride,
    WIDTH: tl.constexpr, SCHEME: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a program quantizes `ROWS * 128` channels of a token of x, given as `StridedRows`."""
    token = tl.program_id(0)
    first_group = tl.program_id(1) * ROWS
    column = (first_group + tl.arange(0, ROWS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    pdl_wait(DEPENDENT)
    at = token.to(tl.int64) // x_inner * x_outer_stride + token % x_inner * x_inner_stride
    values = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    store_fp8(values, inside, column, first_group, q, s, static_scale, token, num_tokens, WIDTH, SCHEME, ROWS)


def quant_scheme(group: int, scale: Tensor | None) -> int:
    """SCHEME of the kernels: 0 with a static scale, 1 with a scale for each token, 2 for each 128 channels of a token."""
    return 0 if scale is not None else 1 if group == 0 else 2


def padded_groups(width: int) -> int:
    """ROWS of a whole token: its groups of 128, padded to a power of two."""
    return next_power_of_2(cdiv(width, 128))


def groups_per_program(width: int, scheme: int) -> int:
    """ROWS of a program; SCHEME 1 needs the whole token."""
    return padded_groups(width) if scheme == 1 else min(padded_groups(width), 8)


def num_warps_for(rows: int) -> int:
    """Warps of a program: eight numbers a thread, if there are enough."""
    return min(max(rows // 2, 1), 16)


def launch_quant(x: Tensor, group: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `fp8_quant`."""
    width = x.shape[-1]
    rows, scheme = strided_rows(x), quant_scheme(group, scale)
    q, s = empty_quantized(x, width, group, scale)
    if rows.count:
        part, dependent = groups_per_program(width, scheme), use_pdl(x)
        quant_kernel[(rows.count, cdiv(cdiv(width, 128), part))](
            rows.tensor, q, s, s if scale is None else scale, rows.count, rows.inner, rows.outer_stride, rows.inner_stride,
            WIDTH=width, SCHEME=scheme, ROWS=part, DEPENDENT=dependent,
            num_warps=num_warps_for(part), **pdl_options(dependent),
        )  # fmt: skip
    elif scale is not None:
        s.copy_(scale)
    return q, s


def use_pdl(x: Tensor) -> bool:
    """Whether to use dependent launch: with few tokens, where the launch overhead counts."""
    return x.numel() <= x.shape[-1] * PDL_MAX_TOKENS and supports_pdl(x.device)
