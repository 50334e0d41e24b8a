"""Triton kernels for routed experts with many tokens: products at the rate of the tensor cores.

Pairs are sorted by expert, and a list names the tiles of BLOCK_M rows that each expert has (`launch_sort_tiles`). A program for
each multiprocessor computes one tile of rows and columns after another; of the first product, whose tiles differ in size, there is
a program for each. Weights are read by tensor descriptors, and so are the rows of the second product; those of the first are
gathered by asynchronous copies. Grids depend on sizes only, and every sum has a fixed order.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torchweave.ops.kernels.moe.experts_gemv import activation, gated_activation
from torchweave.ops.kernels.moe.sort_pairs import SortedPairs
from torchweave.ops.kernels.sizes import cdiv


@triton.jit
def _weight_tile(
    weight, expert, half, column, start, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """[BLOCK_K, COLUMNS] of an expert's weight, zeros outside it; see `_weight`."""
    if TRANSPOSED:
        return weight.load([expert, start, half, column]).reshape(BLOCK_K, COLUMNS)
    else:  # noqa: RET505
        return weight.load([expert, half, column, start]).reshape(COLUMNS, BLOCK_K).T


@triton.jit
def _tile(ends, tiles, number, blocks, most, BLOCK_M: tl.constexpr):
    """Expert, first row, end of the expert's rows, and block of columns of a tile; numbers of an expert are contiguous.

    All rows of an expert come before its next columns: its weights are read once, and its rows stay in the L2 cache.
    """
    entry = tiles + 1 + number // blocks
    expert = tl.load(entry)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    number -= tl.load(entry + most + 1) * blocks
    count = tl.cdiv(end - begin, BLOCK_M)
    return expert, begin + number % count * BLOCK_M, end, number // count


@triton.jit
def _up_tile(
    x, up, bias, h, rows, inner, x_stride, expert, begin, end, column,
    WIDTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N activated columns of rows `[begin, end)` of an expert's, up to BLOCK_M.

    Columns of gate and up share a tile of twice BLOCK_N, in the layout of the weight: two blocks, or alternating. Two blocks of a
    transposed weight are two products: Triton would copy a tile of both in shared memory.
    """
    APART: tl.constexpr = GATED and TRANSPOSED and not INTERLEAVED
    COLUMNS: tl.constexpr = 2 * BLOCK_N if GATED and not APART else BLOCK_N
    dtype = h.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    row = begin + tl.arange(0, BLOCK_M)
    # Behind the expert's last row its own is computed again, and not stored.
    token = tl.load(rows + tl.minimum(row, end - 1)) // TOP
    inputs = x + token.to(tl.int64) * x_stride
    first = column * 2 if GATED and INTERLEAVED else column
    total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    value = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        here = inputs[:, None] + (start + k)[None, :]
        if WIDTH % BLOCK_K == 0:  # noqa: SIM108
            a = tl.load(here)
        else:
            a = tl.load(here, mask=(start + k < WIDTH)[None, :], other=0.0)
        total = tl.dot(a, _weight_tile(up, expert, 0, first, start, COLUMNS, BLOCK_K, TRANSPOSED), total)
        if APART:
            value = tl.dot(a, _weight_tile(up, expert, 1, first, start, COLUMNS, BLOCK_K, TRANSPOSED), value)
    if HAS_BIAS:
        c = tl.arange(0, COLUMNS)
        at = first + c if INTERLEAVED or not GATED else c // BLOCK_N * inner + column + c % BLOCK_N
        columns = inner * 2 if GATED else inner
        total += tl.load(bias + expert * columns + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
        if APART:
            at += inner
            value += tl.load(bias + expert * columns + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
    total = total.to(dtype).to(tl.float32)
    if GATED:
        if APART:
            gate, value = total, value.to(dtype).to(tl.float32)
        elif INTERLEAVED:
            gate, value = tl.reshape(total, [BLOCK_M, BLOCK_N, 2]).split()
        else:
            gate, value = tl.reshape(total, [BLOCK_M, 2, BLOCK_N]).permute(0, 2, 1).split()
        result = gated_activation(gate, value, ACTIVATION, ALPHA, LIMIT, dtype)
    else:
        result = activation(total, ACTIVATION)
    row, n = begin + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    at = h + row.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(at, result.to(dtype), mask=(row < end)[:, None] & (n < inner)[None, :])


@triton.jit
def grouped_up_kernel(
    x, up, bias, h, ends, rows, tiles, inner, most, x_stride,
    WIDTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h[row, I]: BLOCK_N activated columns of BLOCK_M pairs of one expert at a time, or of its last, half as many."""
    HALF: tl.constexpr = BLOCK_M // 2
    blocks = tl.cdiv(inner, BLOCK_N)
    for number in tl.range(tl.program_id(0), tl.load(tiles) * blocks, tl.num_programs(0)):
        expert, begin, end, block = _tile(ends, tiles, number, blocks, most, BLOCK_M)
        column = block * BLOCK_N
        if end - begin > HALF:
            _up_tile(
                x, up, bias, h, rows, inner, x_stride, expert, begin, end, column, WIDTH, TOP, GATED, INTERLEAVED, TRANSPOSED,
                HAS_BIAS, ACTIVATION, ALPHA, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _up_tile(
                x, up, bias, h, rows, inner, x_stride, expert, begin, end, column, WIDTH, TOP, GATED, INTERLEAVED, TRANSPOSED,
                HAS_BIAS, ACTIVATION, ALPHA, LIMIT, HALF, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def grouped_down_kernel(
    h, down, y, ends, rows, tiles, num_outputs, most,
    INNER: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pair, K], unweighted: BLOCK_N columns of BLOCK_M pairs of one expert, at a time."""
    blocks = tl.cdiv(num_outputs, BLOCK_N)
    # One loop over all tiles loads the next tile while it stores the sums of one.
    for number in tl.range(tl.program_id(0), tl.load(tiles) * blocks, tl.num_programs(0), flatten=True):
        expert, begin, end, block = _tile(ends, tiles, number, blocks, most, BLOCK_M)
        column = block * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            b = _weight_tile(down, expert, 0, column, start, BLOCK_N, BLOCK_K, TRANSPOSED)
            total = tl.dot(h.load([begin, start]), b, total)
        row, n = begin + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        pair = tl.load(rows + row, mask=row < end, other=0).to(tl.int64)
        at = y + pair[:, None] * num_outputs + n[None, :]
        tl.store(at, total.to(y.dtype.element_ty), mask=(row < end)[:, None] & (n < num_outputs)[None, :])


def _weight(weight: Tensor, halves: int, columns: int, block_k: int, transposed: bool) -> TensorDescriptor:
    """Tiles of a weight [E, N, K], or [E, K, N] if transposed: columns of each of `halves` of its N, and block_k of K.

    A tile of a transposed weight has columns of one half.
    """
    weight = weight.unflatten(2 if transposed else 1, (halves, -1))
    block = [1, block_k, 1, columns] if transposed else [1, halves, columns, block_k]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)


def _most_tiles(pairs: SortedPairs) -> int:
    return pairs.tiles.shape[1] - 1


def launch_grouped_up(
    x: Tensor, up: Tensor, bias: Tensor | None, h: Tensor, pairs: SortedPairs, top: int,
    *, gated: bool, interleaved: bool, transposed: bool, activation: str, alpha: float, limit: float, block_m: int, block_n: int,
    block_k: int, num_warps: int, depth: int,
) -> None:  # fmt: skip
    """x [T, K], up as [E, 2 I or I, K] or transposed [E, K, 2 I or I], rows of 16 bytes' multiples; h [T k, I] by row of pairs."""
    inner = h.shape[1]
    halves = 2 if gated and not interleaved else 1
    grouped_up_kernel[(_most_tiles(pairs) * cdiv(inner, block_n),)](
        x, _weight(up, halves, 2 * block_n if gated and interleaved else block_n, block_k, transposed),
        x if bias is None else bias, h, *pairs, inner, _most_tiles(pairs), x.stride(0), WIDTH=x.shape[1], TOP=top, GATED=gated,
        INTERLEAVED=interleaved, TRANSPOSED=transposed, HAS_BIAS=bias is not None, ACTIVATION=activation, ALPHA=alpha,
        LIMIT=limit, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=depth,
    )  # fmt: skip


def launch_grouped_down(
    h: Tensor, down: Tensor, y: Tensor, pairs: SortedPairs,
    *, transposed: bool, block_m: int, block_n: int, block_k: int, num_warps: int, depth: int,
) -> None:  # fmt: skip
    """h [T k, I] by row of pairs, down as [E, K, I] or transposed [E, I, K], y [T k, K] by pair."""
    rows = TensorDescriptor(h, list(h.shape), list(h.stride()), [block_m, block_k])
    programs = _most_tiles(pairs) * cdiv(y.shape[1], block_n)
    if h.is_cuda:
        programs = min(programs, torch.cuda.get_device_properties(h.device).multi_processor_count)
    grouped_down_kernel[(programs,)](
        rows, _weight(down, 1, block_n, block_k, transposed), y, *pairs, y.shape[1], _most_tiles(pairs),
        INNER=h.shape[1], TRANSPOSED=transposed, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps,
        num_stages=depth,
    )  # fmt: skip
