"""Triton: the row of a program of a launch over tiles of tokens, found on the device.

A CUDA graph may hold such a launch for any rows: row i's tiles of SIZE tokens begin at `query_start[i] // SIZE + i`, and
`num_tokens // SIZE + num_rows + 1` programs are always enough. The padded tokens after the last row are one more row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROWS = tl.constexpr(128)  # that one load reads
_LANES = tl.constexpr(32)


@triton.jit
def uniform(number):
    """A number that is the same in all threads, as one that the assembler knows to be the same.

    It knows that of a maximum over a warp, not of a sum or maximum over several warps, from Triton 3.8 on. Loop counters and the
    addresses of products that follow from such a number take a fifth more registers.
    """
    return tl.max(tl.zeros([_LANES], number.dtype) + number, 0)


@triton.jit
def find_row(query_start, tile, num_rows, SIZE: tl.constexpr):
    """The last row whose tiles begin at or before `tile`; `num_rows` means the padded tokens."""
    row = -1
    for start in range(0, num_rows + 1, _ROWS):
        rows = start + tl.arange(0, _ROWS)
        first = tl.load(query_start + rows, mask=rows <= num_rows, other=0)
        row += uniform(tl.sum(((first // SIZE + rows <= tile) & (rows <= num_rows)).to(tl.int32), 0))
    return row
