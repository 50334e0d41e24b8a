"""Triton: copy blocks of the paged KV cache to pinned, mapped host memory and back, all layers in one launch.

A copy engine needs one copy for every layer of every block, each of which costs the host some microseconds. A few programs
saturate the bus and leave the other multiprocessors to the steps.
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
"""Bytes of one load."""


@triton.jit(do_not_specialize=["num_items", "num_parts"])
def copy_blocks_kernel(pairs, parts, num_items, num_parts, TO_HOST: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `num_items` = pairs x parts.

    pairs: int64 `[n, 2]`, block index and host address of the block's copy.
    parts: int64 `[num_parts, 3]`, for each tensor its address, its words per block, and their offset in a host copy.
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
    """Launch the copy on the current stream; both arguments are device tensors."""
    items = pairs.shape[0] * parts.shape[0]
    copy_blocks_kernel[(min(NUM_PROGRAMS, items),)](
        pairs, parts, items, parts.shape[0], TO_HOST=to_host, BLOCK=_BLOCK, num_warps=8
    )
