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
from torchweave.ops.kernels.quant.int_linear import BLOCK, WORDS, format_of, parts_of, scale_value
from torchweave.ops.kernels.quant.int_tiles import block_numbers, of_blocks
from torchweave.ops.kernels.sizes import cdiv


@triton.jit(do_not_specialize=["num_outputs"])
def dequantize_words_kernel(
    w, scale, zero, out, row_scale, num_outputs, FORMAT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr, BLOCKS_OF_PROGRAM: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The values [N, K] of a weight of 4 bits, rounded once: a program for each run of blocks of 128 inputs, row after row."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = WIDTH == BLOCKS * BLOCK
    at = tl.program_id(0) * BLOCKS_OF_PROGRAM + tl.arange(0, BLOCKS_OF_PROGRAM)
    real, at, k = at < num_outputs * BLOCKS, tl.minimum(at, num_outputs * BLOCKS - 1), tl.arange(0, BLOCK)
    row, block = at // BLOCKS, at % BLOCKS
    words = w + at.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tile = tl.load(words, eviction_policy="evict_first")
    by = scale_value(of_blocks(scale, row, block, GROUP, GROUPS, PARTS, BLOCKS_OF_PROGRAM))
    if BY_ROW:
        by *= tl.load(row_scale + row)[:, None]
    value = block_numbers(tile, FORMAT, BLOCKS_OF_PROGRAM, out.dtype.element_ty, ASSEMBLY)
    if ZERO:
        point = of_blocks(zero, row, block, GROUP, GROUPS, PARTS, BLOCKS_OF_PROGRAM).to(tl.float32)
        value -= (point - 8.0).to(value.dtype)
    result = (value.to(tl.float32) * by).to(out.dtype.element_ty)
    if EVEN:
        tl.store(out + at.to(tl.int64)[:, None] * BLOCK + k[None, :], result, mask=real[:, None])
    else:
        first, mask = row.to(tl.int64) * WIDTH + block * BLOCK, k[None, :] < (WIDTH - block * BLOCK)[:, None]
        tl.store(out + first[:, None] + k[None, :], result, mask=real[:, None] & mask)


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
    (outputs, width), groups = out.shape, scale.shape[1]
    point = scale if zero is None else zero
    constants: dict[str, Any] = {"WIDTH": width, "GROUP": group, "GROUPS": groups, "ZERO": zero is not None}
    if w.dtype == torch.int8:
        grid = (cdiv(outputs, 16), cdiv(width, 512))
        dequantize_bytes_kernel[grid](w, scale, point, out, outputs, BLOCK_N=16, BLOCK_K=512, num_warps=8, **constants)
        return
    hopper = out.is_cuda and supports_pdl(out.device) and out.dtype in (torch.bfloat16, torch.float16)
    dequantize_words_kernel[(cdiv(outputs * cdiv(width, 128), 64),)](
        w, scale, point, out, scale if row_scale is None else row_scale, outputs, FORMAT=format_of(scale),
        PARTS=parts_of(scale, group), BY_ROW=row_scale is not None, BLOCKS_OF_PROGRAM=64, ASSEMBLY=hopper,
        num_warps=4, **constants,
    )  # fmt: skip
