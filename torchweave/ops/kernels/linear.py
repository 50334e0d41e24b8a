"""Triton kernels for `x @ w.T` with few tokens, where the weight is read once and its bandwidth is all that counts.

Both may be launched as dependents of the kernel before (programmatic dependent launch): they start while it drains, the row kernel
with its first weights already under way, and wait before they touch anything that it wrote.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def row_kernel(
    x, w, bias, out, num_outputs, x_stride, w_stride, out_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[TOKENS, N], for one or two tokens: a program multiplies BLOCK_N whole rows of w by x, element by element in float32."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < num_outputs
    k = tl.arange(0, BLOCK_K)
    weights = w + rows.to(tl.int64)[:, None] * w_stride + k[None, :]
    tile = tl.load(weights, mask=inside[:, None] & (k < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    sum0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sum1 = tl.zeros([BLOCK_N, BLOCK_K] if TOKENS > 1 else [1, 1], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLL):
        here = start + k
        ahead = inside[:, None] & (here + BLOCK_K < WIDTH)[None, :]
        following = tl.load(weights + start + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
        value = tile.to(tl.float32)
        sum0 += value * tl.load(x + here, mask=here < WIDTH, other=0.0).to(tl.float32)[None, :]
        if TOKENS > 1:
            sum1 += value * tl.load(x + x_stride + here, mask=here < WIDTH, other=0.0).to(tl.float32)[None, :]
        tile = following
    added = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([BLOCK_N], tl.float32)
    tl.store(out + rows, (tl.sum(sum0, axis=1) + added).to(out.dtype.element_ty), mask=inside)
    if TOKENS > 1:
        tl.store(out + out_stride + rows, (tl.sum(sum1, axis=1) + added).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def dot_kernel(
    x, w, bias, out, num_tokens, num_outputs, x_stride, w_stride, out_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[num_tokens <= TOKENS, N] on tensor cores, with the rows of w as the long side: w [BLOCK_N, K] times x.T [K, TOKENS]."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    inside, real = rows < num_outputs, token < num_tokens
    k = tl.arange(0, BLOCK_K)
    weights = w + rows.to(tl.int64)[:, None] * w_stride + k[None, :]
    inputs = x + token[None, :] * x_stride + k[:, None]
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        left = k < WIDTH - start
        a = tl.load(weights + start, mask=inside[:, None] & left[None, :], other=0.0, eviction_policy="evict_first")
        b = tl.load(inputs + start, mask=left[:, None] & real[None, :], other=0.0)
        total = tl.dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + token[None, :] * out_stride + rows[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


def launch_row(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor,
    *, block_n: int, block_k: int, num_warps: int, unroll: int, dependent: bool,
) -> None:  # fmt: skip
    """x [T, K], w [N, K], out [T, N] with T 1 or 2; rows contiguous."""
    row_kernel[(triton.cdiv(w.shape[0], block_n),)](
        x, w, w if bias is None else bias, out, w.shape[0], x.stride(0), w.stride(0), out.stride(0),
        WIDTH=w.shape[1], TOKENS=x.shape[0], HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=unroll,
        DEPENDENT=dependent, num_warps=num_warps, **_dependent_launch(dependent),
    )  # fmt: skip


def launch_dot(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor,
    *, block_n: int, block_k: int, num_warps: int, stages: int, dependent: bool,
) -> None:  # fmt: skip
    """x [T, K], w [N, K], out [T, N]; rows contiguous. T is padded to a power of two of at least 16 inside."""
    tokens = x.shape[0]
    dot_kernel[(triton.cdiv(w.shape[0], block_n),)](
        x, w, w if bias is None else bias, out, tokens, w.shape[0], x.stride(0), w.stride(0), out.stride(0),
        WIDTH=w.shape[1], TOKENS=max(16, triton.next_power_of_2(tokens)), HAS_BIAS=bias is not None, BLOCK_N=block_n,
        BLOCK_K=block_k, DEPENDENT=dependent, num_warps=num_warps, num_stages=stages, **_dependent_launch(dependent),
    )  # fmt: skip


def _dependent_launch(dependent: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if dependent else {}
