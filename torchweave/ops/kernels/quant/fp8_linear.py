"""Triton kernels for FP8 products `(q * s) @ (w * ws).T`, with scales by row or by block of 128 x 128.

`row_kernel` multiplies element by element and reads the weight once at memory bandwidth (1 or 2 tokens); `dot_kernel` uses
tensor cores at any number of tokens. Both sum in float32: tensor cores add e4m3 products with about 14 bits, so their sums over
128 channels are moved into float32 registers.

Under programmatic dependent launch they start while the previous kernel drains, the row kernel with loads of its first weights,
and wait before they read that kernel's results.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.sizes import cdiv

RUN: tl.constexpr = tl.constexpr(16)
"""Channels of a thread's load, whose products it adds first: they lie within a block of 128."""


@triton.jit
def _scales(scale, first, stride, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    """float32 scale of each run of channels of `[first, first + BLOCK_K)`, one per 128; a dummy without BLOCKS."""
    if BLOCKS:
        block = (first + tl.arange(0, BLOCK_K // RUN) * RUN) // 128
        scales = tl.load(scale + block * stride, mask=block < (WIDTH + 127) // 128, other=0.0)
    else:
        scales = tl.zeros([BLOCK_K // RUN], tl.float32)
    return scales


@triton.jit
def _add_runs(total, value, token, scale, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """total `[BLOCK_N, runs]` plus value `[BLOCK_N, BLOCK_K]` times a token, summed within each run, times its scale."""
    product = value * token.to(tl.float32)[None, :]
    added = tl.sum(tl.reshape(product, [BLOCK_N, BLOCK_K // RUN, RUN]), 2)
    return total + (added * scale[None, :] if BLOCKS else added)


@triton.jit
def row_kernel(
    q, x_scale, w, w_scale, bias, out, num_outputs, w_stride, out_stride, w_scale_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, STATIC: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[TOKENS, N], 1 or 2 tokens: a program multiplies BLOCK_N whole rows of w, of one block of 128 rows, by the tokens.

    Threads exchange nothing before the end: each loads the weights, tokens and scales that it multiplies, one iteration ahead.
    """
    rows, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = (rows < num_outputs)[:, None]
    weights = w + rows.to(tl.int64)[:, None] * w_stride + k[None, :]
    by_rows = w_scale + tl.program_id(0) * BLOCK_N // 128 * w_scale_stride
    tile = tl.load(weights, mask=inside & (k < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")
    by_block = _scales(by_rows, 0, 1, WIDTH, BLOCKS, BLOCK_K)
    pdl_wait(DEPENDENT)
    token0 = tl.load(q + k, mask=k < WIDTH, other=0.0)
    scale0 = _scales(x_scale, 0, TOKENS, WIDTH, BLOCKS, BLOCK_K) * by_block
    total0 = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    if TOKENS > 1:
        token1 = tl.load(q + WIDTH + k, mask=k < WIDTH, other=0.0)
        scale1 = _scales(x_scale + 1, 0, TOKENS, WIDTH, BLOCKS, BLOCK_K) * by_block
        total1 = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    for first in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLL):
        ahead = first + BLOCK_K
        left = ahead + k < WIDTH
        next_tile = tl.load(weights + ahead, mask=inside & left[None, :], other=0.0, eviction_policy="evict_first")
        next_by_block = _scales(by_rows, ahead, 1, WIDTH, BLOCKS, BLOCK_K)
        next_token0 = tl.load(q + ahead + k, mask=left, other=0.0)
        next_scale0 = _scales(x_scale, ahead, TOKENS, WIDTH, BLOCKS, BLOCK_K)
        value = tile.to(tl.float32)
        total0 = _add_runs(total0, value, token0, scale0, BLOCKS, BLOCK_N, BLOCK_K)
        if TOKENS > 1:
            next_token1 = tl.load(q + WIDTH + ahead + k, mask=left, other=0.0)
            next_scale1 = _scales(x_scale + 1, ahead, TOKENS, WIDTH, BLOCKS, BLOCK_K)
            total1 = _add_runs(total1, value, token1, scale1, BLOCKS, BLOCK_N, BLOCK_K)
            token1, scale1 = next_token1, next_scale1 * next_by_block
        tile, token0, scale0 = next_tile, next_token0, next_scale0 * next_by_block
    real = rows < num_outputs
    added = tl.load(bias + rows, mask=real, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([BLOCK_N], tl.float32)
    by_row = tl.zeros([BLOCK_N], tl.float32) + 1.0 if BLOCKS else tl.load(w_scale + rows, mask=real, other=0.0)
    by_token = 1.0 if BLOCKS else tl.load(x_scale)
    result = tl.sum(total0, 1) * by_token * by_row + added
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=real)
    if TOKENS > 1:
        by_token = 1.0 if BLOCKS else tl.load(x_scale + (0 if STATIC else 1))
        result = tl.sum(total1, 1) * by_token * by_row + added
        tl.store(out + out_stride + rows, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_tokens"])
def dot_kernel(
    q, x_scale, w, w_scale, bias, out, num_tokens, num_outputs, w_stride, out_stride, w_scale_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, STATIC: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N tiles, T tiles): out[TOKENS, BLOCK_N] with the rows of w as the long side: w [BLOCK_N, K] times q.T [K, TOKENS]."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside, real = rows < num_outputs, token < num_tokens
    k = tl.arange(0, BLOCK_K)
    weights = w + rows.to(tl.int64)[:, None] * w_stride + k[None, :]
    inputs = q + token.to(tl.int64)[None, :] * WIDTH + k[:, None]
    pdl_wait(DEPENDENT)
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        left = k < WIDTH - first
        a = tl.load(weights + first, mask=inside[:, None] & left[None, :], other=0.0, eviction_policy="evict_first")
        b = tl.load(inputs + first, mask=left[:, None] & real[None, :], other=0.0)
        if BLOCKS:  # BLOCK_K is 128: one scale for each token, and one for each block of rows
            by_token = tl.load(x_scale + first // 128 * num_tokens + token, mask=real, other=0.0)
            by_row = tl.load(w_scale + rows // 128 * w_scale_stride + first // 128, mask=inside, other=0.0)
            total += tl.dot(a, b) * (by_row[:, None] * by_token[None, :])
        else:
            total = tl.dot(a, b, total, max_num_imprecise_acc=128)
    if not BLOCKS:
        by_token = tl.load(x_scale + (token * 0 if STATIC else token), mask=real, other=0.0)
        by_row = tl.load(w_scale + rows, mask=inside, other=0.0)
        total *= by_row[:, None] * by_token[None, :]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + token.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


def launch_row(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor,
    *, block_n: int, block_k: int, num_warps: int, unroll: int, dependent: bool,
) -> None:  # fmt: skip
    """q [T, K], w [N, K], out [T, N] with T 1 or 2; rows contiguous, `block_n` divides 128. Scales as `fp8_linear`."""
    row_kernel[(cdiv(w.shape[0], block_n),)](
        q, x_scale, w, w_scale, w if bias is None else bias, out, w.shape[0], w.stride(0), out.stride(0), w_scale.stride(0),
        WIDTH=w.shape[1], TOKENS=q.shape[0], BLOCKS=w_scale.ndim == 2, STATIC=x_scale.ndim == 1, HAS_BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=unroll, DEPENDENT=dependent, num_warps=num_warps,
        **pdl_options(dependent),
    )  # fmt: skip


def launch_dot(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor,
    *, block_n: int, block_t: int, block_k: int, num_warps: int, stages: int, dependent: bool,
) -> None:  # fmt: skip
    """q [T, K], w [N, K], out [T, N]; rows contiguous. `block_t`, the tokens of a program, is a power of two of at least 16."""
    blocks = w_scale.ndim == 2
    dot_kernel[(cdiv(w.shape[0], block_n), cdiv(q.shape[0], block_t))](
        q, x_scale, w, w_scale, w if bias is None else bias, out, q.shape[0], w.shape[0], w.stride(0), out.stride(0),
        w_scale.stride(0), WIDTH=w.shape[1], TOKENS=block_t, BLOCKS=blocks, STATIC=x_scale.ndim == 1,
        HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=128 if blocks else block_k, DEPENDENT=dependent,
        num_warps=num_warps, num_stages=stages, **pdl_options(dependent),
    )  # fmt: skip
