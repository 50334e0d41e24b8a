"""Triton: rows and chunks of a step, found on the device, and activations.

A CUDA graph may hold a launch over chunks for any rows: row i's chunks of CHUNK tokens begin at `query_start[i] // CHUNK + i`, and
`num_tokens // CHUNK + num_rows + 1` programs are always enough. The padded tokens after the last row are one more row.

A recorded step has room for many more rows than a prompt needs, and a program without work costs as much as finding that out. So
large kernels number the chunks of rows that have more than FEW tokens, and a few programs share them (`count_chunks`,
`numbered_chunk`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.find_row import find_row, uniform

READ, COMMIT = tl.constexpr(1), tl.constexpr(2)  # of `StateAccess`
WHOLE = tl.constexpr(1 << 30)  # as CHUNK: a row is one chunk
_SCANNED_ROWS = tl.constexpr(1024)  # that one load reads


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
def _num_chunks(query_start, rows, num_rows, num_tokens, CHUNK: tl.constexpr, FEW: tl.constexpr, PADDED: tl.constexpr):
    """Chunks of each row with more than FEW tokens, and with PADDED of the padded tokens; 0 of others."""
    first = tl.load(query_start + rows, mask=rows <= num_rows, other=0)
    end = tl.load(query_start + rows + 1, mask=rows < num_rows, other=0)
    is_padding = rows == num_rows
    length = tl.where(is_padding, num_tokens if PADDED else first, end) - first
    return tl.where((length > FEW) | is_padding, (length + CHUNK - 1) // CHUNK, 0)


@triton.jit
def count_chunks(query_start, num_rows, num_tokens, CHUNK: tl.constexpr, FEW: tl.constexpr, PADDED: tl.constexpr):
    """Number of chunks of rows with more than FEW tokens, and with PADDED of the padded tokens."""
    count = 0
    for start in range(0, num_rows + 1, _SCANNED_ROWS):
        rows = start + tl.arange(0, _SCANNED_ROWS)
        count += tl.sum(_num_chunks(query_start, rows, num_rows, num_tokens, CHUNK, FEW, PADDED), 0)
    return count


@triton.jit
def numbered_chunk(
    query_start, number, num_rows, num_tokens, CHUNK: tl.constexpr, FEW: tl.constexpr, PADDED: tl.constexpr
):
    """Chunk `number` of those that `count_chunks` counts: its row, the row's first and last + 1 token, and the chunk's first
    token. Row -1: there is none; row `num_rows`: the padded tokens."""
    row, offset, before = -1, 0, 0
    for start in range(0, num_rows + 1, _SCANNED_ROWS):
        rows = start + tl.arange(0, _SCANNED_ROWS)
        chunks = _num_chunks(query_start, rows, num_rows, num_tokens, CHUNK, FEW, PADDED)
        following = before + tl.cumsum(chunks, 0)
        own = (number >= following - chunks) & (number < following)
        row += uniform(tl.sum(tl.where(own, rows + 1, 0), 0))
        offset += uniform(tl.sum(tl.where(own, number - following + chunks, 0), 0))
        before += tl.sum(chunks, 0)
    first = tl.load(query_start + tl.maximum(row, 0))
    end = num_tokens
    if row < num_rows:
        end = tl.load(query_start + tl.maximum(row, 0) + 1)
    return row, first, end, first + offset * CHUNK


@triton.jit
def in_this_iteration(number, DEPENDENT: tl.constexpr):
    """The number, which the compiler takes for another one in each iteration of a loop: what follows from it is not computed before
    the loop, where it would take registers from the loop's body."""
    if DEPENDENT > 0:  # not in the interpreter, which knows no assembly
        number = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
    return number


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
