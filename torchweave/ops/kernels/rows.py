"""Tensors as rows of their last dimension, for kernels with a program for each row."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class StridedRows(NamedTuple):
    """Row r of `tensor` begins at `r // inner * outer_stride + r % inner * inner_stride`.

    Attributes:
        tensor: the given tensor, or a contiguous copy if two strides cannot describe its rows.
        count: number of rows.
    """

    tensor: Tensor
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.count is not used)
    inner: int
    outer_stride: int
    inner_stride: int


def strided_rows(x: Tensor) -> StridedRows:
    """The rows of x. Heads that are slices of a merged projection need no copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    steps: list[tuple[int, int]] = []  # (size, stride) from the outermost, contiguous neighbors merged
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if steps and steps[-1][1] == size * stride:
            steps[-1] = (steps[-1][0] * size, stride)
        else:
            steps.append((size, stride))
    if len(steps) > 2:
        return strided_rows(x.contiguous())
    count = math.prod(x.shape[:-1])
    if len(steps) == 2:
        return StridedRows(x, count, steps[1][0], steps[0][1], steps[1][1])
    return StridedRows(x, count, 1, steps[0][1] if steps else x.shape[-1], 0)
