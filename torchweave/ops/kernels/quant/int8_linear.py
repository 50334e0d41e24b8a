"""Triton kernels of `torchweave::int8_linear`: tokens rounded to 8 bits, and their product with a weight in 8 bits."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2

ROUND: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: added and subtracted, it rounds a float32 to the nearest integer, a tie to the even one."""


@triton.jit
def quantize_kernel(x, q, s, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (T): a token."""
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    pdl_wait(DEPENDENT)
    values = tl.load(x + token * x_stride + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 0), 1e-10), 127.5)
    rounded = tl.div_rn(values, tl.zeros([BLOCK], tl.float32) + scale)
    rounded = tl.clamp((rounded + ROUND) - ROUND, -128.0, 127.0)
    tl.store(q + token * WIDTH + k, rounded.to(tl.int8), mask=k < WIDTH)
    tl.store(s + token, scale)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "out_stride"])
def product_kernel(
    q, s, w, scale, bias, out, num_tokens, num_outputs, out_stride, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N tiles, T tiles): out[BLOCK_T, BLOCK_N], rows of the weight as the long side."""
    row, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside, real = row < num_outputs, token < num_tokens
    weights = w + tl.minimum(row, num_outputs - 1).to(tl.int64)[:, None] * WIDTH + k[None, :]
    inputs = q + token.to(tl.int64)[None, :] * WIDTH + k[:, None]
    pdl_wait(DEPENDENT)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.int32)
    for first in range(0, WIDTH, BLOCK_K):
        left = k < WIDTH - first
        a = tl.load(weights + first, mask=left[None, :], other=0, eviction_policy="evict_first")
        b = tl.load(inputs + first, mask=left[:, None] & real[None, :], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    by_row = tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)
    result = total.to(tl.float32) * tl.load(s + token, mask=real, other=0.0)[None, :] * by_row[:, None]
    if HAS_BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


def launch(config: Any, x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [T, N] of x [T, K] with contiguous rows, T at least 1, and the rest as `torchweave::int8_linear`."""
    (tokens, width), outputs = x.shape, w.shape[0]
    dependent = x.is_cuda and supports_pdl(x.device)
    q, s = torch.empty(tokens, width, dtype=torch.int8, device=x.device), torch.empty(tokens, device=x.device)
    options = {"WIDTH": width, "DEPENDENT": dependent, **pdl_options(dependent)}
    block = next_power_of_2(width)
    quantize_kernel[(tokens,)](x, q, s, x.stride(0), BLOCK=block, num_warps=min(16, max(1, block // 512)), **options)
    product_kernel[(cdiv(outputs, config.block_n), cdiv(tokens, config.block_t))](
        q, s, w, scale, scale if bias is None else bias, out, tokens, outputs, out.stride(0), HAS_BIAS=bias is not None,
        BLOCK_N=config.block_n, BLOCK_T=config.block_t, BLOCK_K=config.block_k, num_warps=config.num_warps,
        num_stages=config.stages, **options,
    )  # fmt: skip
