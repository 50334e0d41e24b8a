"""Sizes of launches on the host. Triton's `cdiv` and `next_power_of_2` also serve kernels, which costs 4 us a call."""

from __future__ import annotations


def cdiv(size: int, part: int) -> int:
    """`size / part`, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below `size`, which is at least 0."""
    return 1 << max(size - 1, 0).bit_length()
