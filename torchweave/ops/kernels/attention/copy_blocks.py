"""Triton: blocks of the paged KV cache to host memory and back, all layers in one launch; the host's memory is pinned and mapped.

A copy engine would take one copy for every layer's part of every block, each of which costs the host some microseconds. A few
programs are enough for the bus, and leave the other processors to the steps.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 32
_BLOCK = 2048
WORD_BYTES = 8
"""Bytes that are copied at once."""


@triton.jit(do_not_specialize=["num_items", "num_parts"])
def copy_blocks_kernel(pairs, parts, num_items, num_parts, TO_HOST: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `num_items` = pairs x parts.

    pairs: int64 `[n, 2]`, number of a block and address of its place on the host.
    parts: int64 `[num_parts, 3]`, of each tensor its address, the words of a block in it, and where these lie in a place.
    """
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pair, part = item // num_parts, item % num_parts
        words = tl.load(parts + part * 3 + 1)
        device = tl.load(parts + part * 3) + tl.load(pairs + pair * 2) * words * 8
        host = tl.load(pairs + pair * 2 + 1) + tl.load(parts + part * 3 + 2) * 8
        device = device.to(tl.pointer_type(tl.int64))
        host = host.to(tl.pointer_type(tl.int64))
        for start in range(0, words, BLOCK):
            at = start + tl.arange(0, BLOCK)
            if TO_HOST:
                tl.store(host + at, tl.load(device + at, mask=at < words), mask=at < words)
            else:
                tl.store(device + at, tl.load(host + at, mask=at < words), mask=at < words)


def launch_copy_blocks(pairs: Tensor, parts: Tensor, to_host: bool) -> None:
    """Copy on the current stream; both arguments are on the device."""
    items = pairs.shape[0] * parts.shape[0]
    copy_blocks_kernel[(min(NUM_PROGRAMS, items),)](
        pairs, parts, items, parts.shape[0], TO_HOST=to_host, BLOCK=_BLOCK, num_warps=8
    )
