"""Triton: rows and chunks of a step, found on the device, and activations.

A CUDA graph may hold a launch over chunks for any rows: row i's chunks of CHUNK tokens begin at `query_start[i] // CHUNK + i`, and
`num_tokens // CHUNK + num_rows + 1` programs are always enough. The padded tokens behind the last row are one more row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.find_row import find_row

READ, COMMIT = tl.constexpr(1), tl.constexpr(2)  # of `StateAccess`


@triton.jit
def find_chunk(query_start, chunk, num_rows, num_tokens, CHUNK: tl.constexpr):
    """Row of chunk `chunk`, the row's first and last + 1 token, and the chunk's first token, which is not below the last + 1 if
    the row has no such chunk. Row `num_rows` means the padded tokens."""
    row = find_row(query_start, chunk, num_rows, CHUNK)
    first = tl.load(query_start + row)
    end = num_tokens
    if row < num_rows:
        end = tl.load(query_start + row + 1)
    return row, first, end, first + (chunk - first // CHUNK - row) * CHUNK


@triton.jit
def row_tokens(query_start, row, num_rows, num_tokens, DECODE_ONLY: tl.constexpr):
    """First and last + 1 token of a row; row `num_rows` is the padded tokens."""
    if DECODE_ONLY:
        return row, row + 1
    first = tl.load(query_start + row)
    end = num_tokens
    if row < num_rows:
        end = tl.load(query_start + row + 1)
    return first, end


@triton.jit
def row_end(end, length, position, slot, ACCESS: tl.constexpr):
    """Last + 1 token of a row whose state advances; `length` is its sequence's with all drafts."""
    if ACCESS == COMMIT:
        end -= length - tl.load(position + slot)
    return end


@triton.jit
def is_padding(slots, row, num_rows, DECODE_ONLY: tl.constexpr):
    if DECODE_ONLY:
        return tl.load(slots + row, cache_modifier=".cg") < 0
    return row == num_rows


@triton.jit
def decay_rate(A, mask, LOG_RATE: tl.constexpr):
    """A of a scan in float32, at most 0; LOG_RATE: from the logarithm of -A."""
    rate = tl.load(A, mask=mask, other=0.0).to(tl.float32)
    if LOG_RATE:
        rate = -tl.exp(rate)
    return rate


@triton.jit
def softplus(x):
    """log(1 + exp(x)), linear above 20 as in torch; log1p by exp keeps small results exact."""
    small = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + small
    # log(1 + e) * e / ((1 + e) - 1) corrects the rounding of 1 + e (Kahan).
    result = tl.where(wide == 1.0, small, tl.log(wide) * (small / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return tl.where(x > 20.0, x, result)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))
