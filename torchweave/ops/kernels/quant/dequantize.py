"""Triton kernels that write a whole weight in 4 or 8 bits for the BLAS; layouts: `torchweave.ops.quant.int_linear`."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import supports_pdl
from torchweave.ops.kernels.quant.int_linear import BLOCK, WORDS, format_of, nibbles, parameter, parts_of, scale_value
from torchweave.ops.kernels.sizes import cdiv


@triton.jit
def _store_values(
    a, scale, zero, by_row, out, row, rows, c, num_outputs, J: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Store the values of input J of the words c of rows."""
    block, k = (c // WORDS)[None, :], c // WORDS * BLOCK + c % WORDS + 16 * J
    part: tl.constexpr = J * PARTS // 8
    value = a.to(tl.float32)
    if ZERO:
        value -= parameter(zero, rows[:, None], block, part, GROUP, GROUPS, PARTS).to(tl.float32) - 8.0
    value *= scale_value(parameter(scale, rows[:, None], block, part, GROUP, GROUPS, PARTS)) * by_row[:, None]
    at = out + rows[:, None] * WIDTH + k[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(row < num_outputs)[:, None] & (k < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_outputs"])
def dequantize_words_kernel(
    w, scale, zero, out, row_scale, num_outputs, FORMAT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Grid (N tiles, K tiles): the values [N, K] of a weight of 4 bits, rounded once. A word is loaded once for its 8 numbers."""
    COUNT: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK * WORDS
    row, c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = tl.minimum(row, num_outputs - 1).to(tl.int64)
    tile = tl.load(w + rows[:, None] * COUNT + c[None, :], mask=(c < COUNT)[None, :], other=0)
    by_row = tl.full([BLOCK_N], 1.0, tl.float32)
    if BY_ROW:
        by_row = tl.load(row_scale + rows)
    kind: tl.constexpr = out.dtype.element_ty
    a0, a1, a2, a3, a4, a5, a6, a7 = nibbles(tile, FORMAT, 1, BLOCK_N, BLOCK_W, kind, ASSEMBLY)
    _store_values(a0, scale, zero, by_row, out, row, rows, c, num_outputs, 0, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a1, scale, zero, by_row, out, row, rows, c, num_outputs, 1, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a2, scale, zero, by_row, out, row, rows, c, num_outputs, 2, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a3, scale, zero, by_row, out, row, rows, c, num_outputs, 3, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a4, scale, zero, by_row, out, row, rows, c, num_outputs, 4, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a5, scale, zero, by_row, out, row, rows, c, num_outputs, 5, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a6, scale, zero, by_row, out, row, rows, c, num_outputs, 6, WIDTH, GROUP, GROUPS, PARTS, ZERO)
    _store_values(a7, scale, zero, by_row, out, row, rows, c, num_outputs, 7, WIDTH, GROUP, GROUPS, PARTS, ZERO)


@triton.jit(do_not_specialize=["num_outputs"])
def dequantize_bytes_kernel(
    w, scale, zero, out, num_outputs, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for 8 bits; runs of 32 inputs share a scale."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    run = tl.program_id(1) * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    mask, rows = (row < num_outputs)[:, None] & (k < WIDTH)[None, :], row.to(tl.int64)[:, None]
    at = rows * GROUPS + (run * 32 // GROUP)[None, :]
    inside = (row < num_outputs)[:, None] & (run * 32 < WIDTH)[None, :]
    value = tl.reshape(tl.load(w + rows * WIDTH + k[None, :], mask=mask, other=0), [BLOCK_N, BLOCK_K // 32, 32]).to(
        tl.float32
    )
    if ZERO:
        value -= (tl.load(zero + at, mask=inside, other=0).to(tl.float32) - 128.0)[:, :, None]
    value *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    result = tl.reshape(value, [BLOCK_N, BLOCK_K]).to(out.dtype.element_ty)
    tl.store(out + rows * WIDTH + k[None, :], result, mask=mask)


def launch_dequantize(
    w: Tensor, scale: Tensor, zero: Tensor | None, group: int, out: Tensor, row_scale: Tensor | None = None
) -> None:
    """out [N, K], contiguous, of a weight as `torchweave::int_linear`, columns in the order of w."""
    outputs, width = out.shape
    point, groups = scale if zero is None else zero, scale.shape[1]
    constants: dict[str, Any] = {
        "WIDTH": width,
        "GROUP": group,
        "GROUPS": groups,
        "ZERO": zero is not None,
        "BLOCK_N": 16,
    }
    if w.dtype == torch.int8:
        grid = (cdiv(outputs, 16), cdiv(width, 512))
        dequantize_bytes_kernel[grid](w, scale, point, out, outputs, BLOCK_K=512, num_warps=8, **constants)
        return
    hopper = out.is_cuda and supports_pdl(out.device) and out.dtype in (torch.bfloat16, torch.float16)
    dequantize_words_kernel[(cdiv(outputs, 16), cdiv(w.shape[1], 64))](
        w, scale, point, out, scale if row_scale is None else row_scale, outputs, FORMAT=format_of(scale),
        PARTS=parts_of(scale, group), BY_ROW=row_scale is not None, BLOCK_W=64, ASSEMBLY=hopper, num_warps=8, **constants,
    )  # fmt: skip
