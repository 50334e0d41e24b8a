"""Triton: bring a weight that a later kernel reads into the L2 cache, beside a kernel that leaves the memory idle.

Small kernels between two products wait for each other, not for the memory. Programs that such a kernel has in addition ask for the
lines of a weight and end: they wait for nothing, and nothing waits for the lines.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_prefetch

PREFETCH_BYTES = 16 << 20
"""The most of a weight that is prefetched: a third of the L2 cache of an H100."""
_LINE = tl.constexpr(128)
LINES = 1024
"""Lines of a program."""
PREFETCH_TOKENS = 2
"""Up to this many tokens, experts read fewer weights than would replace a prefetched one in the cache."""


@triton.jit
def prefetch_lines(weight, program, num_lines, LINES: tl.constexpr):
    """Ask for lines `[program * LINES, (program + 1) * LINES)` of a weight; those behind its last are that one again."""
    for start in tl.static_range(0, LINES, 128):
        line = tl.minimum(program * LINES + start + tl.arange(0, 128), num_lines - 1)
        pdl_prefetch(weight.to(tl.int64) + line.to(tl.int64) * _LINE, True)


def lines_to_prefetch(weight: Tensor | None, num_tokens: int) -> int:
    """Number of lines of a contiguous weight to ask for, or 0."""
    if weight is None or num_tokens > PREFETCH_TOKENS or weight.device.type == "cpu":  # Triton's interpreter has no assembly
        return 0
    return min(PREFETCH_BYTES, weight.numel() * weight.element_size()) // _LINE.value
