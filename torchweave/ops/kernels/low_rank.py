"""Triton: the products of low-rank adapters, a program for a token and a stretch of its numbers.

Two kernels: x times the rows of the token's first matrix, in float32, and y plus that times the rows of the second. Programs of
tokens without an adapter read nothing in the first one and copy y in the second.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.rows import strided_rows
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2

_INPUTS, _OUTPUTS = 256, 256  # numbers of a program's tile beside the rank


@triton.jit
def _shrink(
    x_at, index_at, a_at, h_at, inner, outer_stride, inner_stride, width,
    RANK: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h [T, RANK] float32 = x [T, K] times a [S, RANK, K] of the token's adapter; nothing for none."""
    token = tl.program_id(0)
    adapter = tl.load(index_at + token)
    if adapter == 0:
        return
    x_at += (token // inner).to(tl.int64) * outer_stride + (token % inner) * inner_stride
    ranks, columns = tl.arange(0, PAD), tl.arange(0, BLOCK)
    a_at += ((adapter - 1).to(tl.int64) * RANK + ranks[:, None]) * width
    total = tl.zeros((PAD, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + columns
        inputs = tl.load(x_at + at, mask=at < width, other=0.0).to(tl.float32)
        mask = (ranks < RANK)[:, None] & (at < width)[None, :]
        total += inputs[None, :] * tl.load(a_at + at[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(h_at + token * RANK + ranks, tl.sum(total, 1), mask=ranks < RANK)


@triton.jit
def _expand(
    y_at, h_at, index_at, b_at, out_at, inner, outer_stride, inner_stride, width,
    RANK: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, N] = y [T, N] + h [T, RANK] times b [S, N, RANK] of the token's adapter."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    y_at += (token // inner).to(tl.int64) * outer_stride + (token % inner) * inner_stride
    y = tl.load(y_at + columns, mask=inside, other=0.0)
    adapter = tl.load(index_at + token)
    if adapter > 0:
        ranks = tl.arange(0, PAD)
        hidden = tl.load(h_at + token * RANK + ranks, mask=ranks < RANK, other=0.0)
        rows = ((adapter - 1).to(tl.int64) * width + columns[:, None]) * RANK + ranks[None, :]
        b = tl.load(b_at + rows, mask=inside[:, None] & (ranks < RANK)[None, :], other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + tl.sum(b * hidden[None, :], 1)).to(y.dtype)
    tl.store(out_at + token.to(tl.int64) * width + columns, y, mask=inside)


def launch(y: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """See `torchweave::low_rank`."""
    outputs, rank, width = y.shape[-1], a.shape[1], a.shape[2]
    inputs, products = strided_rows(x), strided_rows(y)
    out = y.new_empty(y.shape)
    if not products.count:
        return out
    hidden = torch.empty(products.count, rank, dtype=torch.float32, device=y.device)
    pad = next_power_of_2(rank)
    _shrink[(inputs.count,)](
        inputs.tensor, index, a, hidden, inputs.inner, inputs.outer_stride, inputs.inner_stride, width,
        RANK=rank, PAD=pad, BLOCK=max(_INPUTS * 16 // max(pad, 16), 16),
    )  # fmt: skip
    block = max(_OUTPUTS * 16 // max(pad, 16), 16)
    _expand[(products.count, cdiv(outputs, block))](
        products.tensor, hidden, index, b, out, products.inner, products.outer_stride, products.inner_stride, outputs,
        RANK=rank, PAD=pad, BLOCK=block,
    )  # fmt: skip
    return out
