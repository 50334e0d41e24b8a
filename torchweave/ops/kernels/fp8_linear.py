"""Triton kernels for FP8 products `(q * s) @ (w * ws).T`, with scales by row or by block of 128 x 128.

`row_kernel` multiplies element by element and reads the weight once at the memory's speed (1 or 2 tokens); `dot_kernel` uses
tensor cores at any number of tokens. Both keep sums in float32: tensor cores add e4m3 products with about 14 bits, so what they
have summed over 128 channels is moved into float32 registers before it goes on.

Launched as dependents of the kernel before (programmatic dependent launch) they start while it drains, the row kernel with its
first weights under way, and wait before they touch anything that it wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent import enter, options


@triton.jit
def _activation(
    q, x_scale, w_scale, first, token, num_tokens, block_row, w_scale_stride,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """float32 `[GROUPS, 128]` channels of a token from `first` on; BLOCKS: times the scales of both operands, which depend on k."""
    group = tl.arange(0, GROUPS)
    k = first + group[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(q + token * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    if BLOCKS:
        index = first // 128 + group
        real = index < (WIDTH + 127) // 128
        scale = tl.load(x_scale + index * num_tokens + token, mask=real, other=0.0)
        scale *= tl.load(w_scale + block_row * w_scale_stride + index, mask=real, other=0.0)
        value *= scale[:, None]
    return value


@triton.jit
def row_kernel(
    q, x_scale, w, w_scale, bias, out, num_outputs, w_stride, out_stride, w_scale_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, STATIC: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[TOKENS, N], 1 or 2 tokens: a program multiplies BLOCK_N whole rows of w, of one block of 128 rows, by the tokens."""
    GROUPS: tl.constexpr = BLOCK_K // 128
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block_row = tl.program_id(0) * BLOCK_N // 128
    inside = (rows < num_outputs)[:, None, None]
    k = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    weights = w + rows.to(tl.int64)[:, None, None] * w_stride + k[None, :, :]
    tile = tl.load(weights, mask=inside & (k < WIDTH)[None, :, :], other=0.0, eviction_policy="evict_first")
    enter(DEPENDENT)
    sum0 = tl.zeros([BLOCK_N, GROUPS, 128], tl.float32)
    sum1 = tl.zeros([BLOCK_N, GROUPS, 128] if TOKENS > 1 else [1, 1, 1], tl.float32)
    for first in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLL):
        ahead = inside & (first + BLOCK_K + k < WIDTH)[None, :, :]
        following = tl.load(weights + first + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
        value = tile.to(tl.float32)
        x = _activation(q, x_scale, w_scale, first, 0, TOKENS, block_row, w_scale_stride, WIDTH, BLOCKS, GROUPS)
        sum0 += value * x[None, :, :]
        if TOKENS > 1:
            x = _activation(q, x_scale, w_scale, first, 1, TOKENS, block_row, w_scale_stride, WIDTH, BLOCKS, GROUPS)
            sum1 += value * x[None, :, :]
        tile = following
    real = rows < num_outputs
    added = tl.load(bias + rows, mask=real, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([BLOCK_N], tl.float32)
    by_row = tl.zeros([BLOCK_N], tl.float32) + 1.0 if BLOCKS else tl.load(w_scale + rows, mask=real, other=0.0)
    by_token = 1.0 if BLOCKS else tl.load(x_scale)
    total = tl.sum(tl.sum(sum0, axis=2), axis=1) * by_token * by_row + added
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=real)
    if TOKENS > 1:
        by_token = 1.0 if BLOCKS else tl.load(x_scale + (0 if STATIC else 1))
        total = tl.sum(tl.sum(sum1, axis=2), axis=1) * by_token * by_row + added
        tl.store(out + out_stride + rows, total.to(out.dtype.element_ty), mask=real)


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
    enter(DEPENDENT)
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
    row_kernel[(triton.cdiv(w.shape[0], block_n),)](
        q, x_scale, w, w_scale, w if bias is None else bias, out, w.shape[0], w.stride(0), out.stride(0), w_scale.stride(0),
        WIDTH=w.shape[1], TOKENS=q.shape[0], BLOCKS=w_scale.ndim == 2, STATIC=x_scale.ndim == 1, HAS_BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=unroll, DEPENDENT=dependent, num_warps=num_warps,
        **options(dependent),
    )  # fmt: skip


def launch_dot(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor,
    *, block_n: int, block_t: int, block_k: int, num_warps: int, stages: int, dependent: bool,
) -> None:  # fmt: skip
    """q [T, K], w [N, K], out [T, N]; rows contiguous. A program has `block_t` tokens, a power of two of at least 16."""
    blocks = w_scale.ndim == 2
    dot_kernel[(triton.cdiv(w.shape[0], block_n), triton.cdiv(q.shape[0], block_t))](
        q, x_scale, w, w_scale, w if bias is None else bias, out, q.shape[0], w.shape[0], w.stride(0), out.stride(0),
        w_scale.stride(0), WIDTH=w.shape[1], TOKENS=block_t, BLOCKS=blocks, STATIC=x_scale.ndim == 1,
        HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=128 if blocks else block_k, DEPENDENT=dependent,
        num_warps=num_warps, num_stages=stages, **options(dependent),
    )  # fmt: skip
