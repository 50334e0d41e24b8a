"""Triton: copy several tensors of a step's tokens in one launch."""

# Triton's decorators are untyped.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_block(source, target, width, stride, token, column):
    valid = column < width
    value = tl.load(source + token * stride + column, mask=valid, other=0.0)
    tl.store(target + token * width + column, value, mask=valid)


@triton.jit
def copy_tokens(
    source_0, source_1, source_2, source_3, target_0, target_1, target_2, target_3,
    width_0, width_1, width_2, width_3, stride_0, stride_1, stride_2, stride_3, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of token `program_id(1)` of each of the first COUNT sources, whose targets are contiguous."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _copy_block(source_0, target_0, width_0, stride_0, token, column)
    if COUNT > 1:
        _copy_block(source_1, target_1, width_1, stride_1, token, column)
    if COUNT > 2:
        _copy_block(source_2, target_2, width_2, stride_2, token, column)
    if COUNT > 3:
        _copy_block(source_3, target_3, width_3, stride_3, token, column)
