"""Triton: quantization to NVFP4, two codes a byte and an e4m3 scale for each 16. Kernels with FP4 output share `store_fp4`."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.quant.formats import empty_fp4
from torchweave.ops.kernels.quant.fp8_quant import num_warps_for, padded_groups, use_pdl
from torchweave.ops.kernels.rows import strided_rows
from torchweave.ops.kernels.sizes import cdiv

FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def round_e4m3(x):
    """float32 x in [0, 448] rounded to e4m3: adding a large enough number leaves float32 with the last place of e4m3."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 121)
    large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + large) - large


@triton.jit
def code_e2m1(x):
    """Sign and code of the e2m1 number nearest to x."""
    size = tl.abs(x)
    code = (
        (size > 0.25).to(tl.int32)
        + (size >= 0.75).to(tl.int32)
        + (size > 1.25).to(tl.int32)
        + (size >= 1.75).to(tl.int32)
    )
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def store_fp4(values, first_group, q, s, scale, token, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Quantize float32 `values [ROWS, 128]`, zero beyond the token's width, into row `token` of q and s."""
    one = tl.load(scale)
    blocks = tl.reshape(values, [ROWS * 8, 16])
    size = tl.div_rn(tl.max(tl.abs(blocks), 1), tl.full([ROWS * 8], 6.0, tl.float32))
    share = round_e4m3(tl.minimum(tl.div_rn(size, tl.full([ROWS * 8], 1.0, tl.float32) * one), FP8_MAX))
    divisor = tl.broadcast_to((share * one)[:, None], [ROWS * 8, 16])
    divides = divisor > 0
    code = code_e2m1(tl.where(divides, tl.div_rn(blocks, tl.where(divides, divisor, 1.0)), 0.0))
    even, odd = tl.split(tl.reshape(code, [ROWS * 8, 8, 2]))
    block = first_group * 8 + tl.arange(0, ROWS * 8)
    row = token.to(tl.int64)
    tl.store(s + row * (WIDTH // 16) + block, share.to(s.dtype.element_ty), mask=block < WIDTH // 16)
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(q + row * (WIDTH // 2) + at, (even | (odd << 4)).to(tl.uint8), mask=at < WIDTH // 2)


@triton.jit(do_not_specialize=["num_tokens"])
def fp4_quant_kernel(
    x, q, s, scale, num_tokens, x_inner, x_outer_stride, x_inner_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a program quantizes `ROWS * 128` channels of a token of x, given as `StridedRows`."""
    token, first_group = tl.program_id(0), tl.program_id(1) * ROWS
    column = (first_group + tl.arange(0, ROWS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    pdl_wait(DEPENDENT)
    at = token.to(tl.int64) // x_inner * x_outer_stride + token % x_inner * x_inner_stride
    values = tl.load(x + at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    store_fp4(values, first_group, q, s, scale, token, WIDTH, ROWS)


def launch_fp4_quant(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp4_quant`."""
    rows, width = strided_rows(x), x.shape[-1]
    q, s = empty_fp4(x)
    if rows.count:
        part, dependent = min(padded_groups(width), 8), use_pdl(x)
        fp4_quant_kernel[(rows.count, cdiv(cdiv(width, 128), part))](
            rows.tensor, q, s, scale, rows.count, rows.inner, rows.outer_stride, rows.inner_stride,
            WIDTH=width, ROWS=part, DEPENDENT=dependent, num_warps=num_warps_for(part), **pdl_options(dependent),
        )  # fmt: skip
    return q, s
