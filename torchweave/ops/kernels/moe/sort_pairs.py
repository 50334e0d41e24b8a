"""Triton kernels that sort pairs of token and expert by expert on the device, always in the same order.

`rows` holds the pairs grouped by expert, those of expert e in `[ends[e - 1], ends[e])`; at its end those of other ranks' experts.
Few pairs take one launch. Many take two, of programs that each sort a block of them, and get a list of the tiles of BLOCK_M rows.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2

MANY_PAIRS = 8192
"""Pairs above which two launches are faster: 4,608 of 257 experts take 11.4 us in one and 12.0 in two, 73,728 take 93 and 17."""
BLOCK_PAIRS = 1024
"""Pairs of a program of `place_pairs_kernel`, which sorts them in registers and shared memory."""
COUNTS = 8192
"""Numbers of pairs that a program of `place_pairs_kernel` loads in an iteration."""


class SortedPairs(NamedTuple):
    """Pairs sorted by expert.

    Attributes:
        ends: `[E]`, the end of each expert's pairs.
        rows: `[T k]`, the pairs.
        tiles: `[2, 1 + most]`: how many tiles there are, then the expert of each; below, from the second on, its first tile.
    """

    ends: Tensor
    rows: Tensor
    tiles: Tensor


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(
    index, ends, rows, num_pairs, num_experts, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """A stable counting sort: program e finds the pairs of expert e; the last program those of other ranks' experts."""
    own_expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    pdl_wait(DEPENDENT)
    below = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        real = start + lane < num_pairs
        expert = tl.minimum(tl.load(index + start + lane, mask=real, other=0), num_experts)
        below += (real & (expert < own_expert)).to(tl.int32)
        equal += (real & (expert == own_expert)).to(tl.int32)
    position = tl.sum(below)
    count = tl.sum(equal)
    if own_expert < num_experts:
        tl.store(ends + own_expert, position + count)
    if count > 0:
        for start in range(0, num_pairs, BLOCK):
            pair = start + lane
            real = pair < num_pairs
            expert = tl.minimum(tl.load(index + pair, mask=real, other=0), num_experts)
            selected = (real & (expert == own_expert)).to(tl.int32)
            at = position + tl.cumsum(selected, 0) - 1
            tl.store(rows + at, pair, mask=selected == 1)
            position += tl.sum(selected)


@triton.jit
def _experts_of(index, pair, num_pairs, num_experts):
    """Experts of pairs; `num_experts` for those of other ranks and after the last pair."""
    expert = tl.load(index + pair, mask=pair < num_pairs, other=num_experts)
    return tl.minimum(expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(index, counts, num_pairs, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """counts[block, expert]: pairs of an expert among BLOCK of them."""
    block = tl.program_id(0)
    expert = _experts_of(index, block * BLOCK + tl.arange(0, BLOCK), num_pairs, num_experts)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(expert, EXPERTS))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "most"])
def place_pairs_kernel(
    index, counts, ends, rows, tiles, num_pairs, num_blocks, num_experts, most,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the pairs of a block to their rows: after those of smaller experts, and of equal experts in blocks before.

    The first program writes the ends and the tiles.
    """
    own_block = tl.program_id(0)
    e, lane = tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        count = tl.load(counts + block[:, None] * EXPERTS + e[None, :], mask=(block < num_blocks)[:, None], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((block < own_block)[:, None], count, 0), 0)
    own = tl.load(counts + own_block * EXPERTS + e)
    end = tl.cumsum(total, 0)
    # Pair i of the sorted block is pair i - (the block's pairs of smaller experts) of its expert's.
    shift = end - total + before - (tl.cumsum(own, 0) - own)
    expert = _experts_of(index, own_block * BLOCK + lane, num_pairs, num_experts)
    key = tl.sort(expert * BLOCK + lane)
    pair = own_block * BLOCK + key % BLOCK
    tl.store(rows + tl.gather(shift, key // BLOCK, 0) + lane, pair, mask=pair < num_pairs)
    if own_block == 0:
        real = e < num_experts
        tl.store(ends + e, end, mask=real)
        number = tl.where(real, tl.cdiv(total, BLOCK_M), 0)
        first = tl.cumsum(number, 0) - number
        at = tiles + 1 + first
        tl.store(tiles, tl.sum(number))
        for i in range(tl.max(number)):
            tl.store(at + i, e, mask=i < number)
            tl.store(at + most + 1 + i, first, mask=i < number)


def launch_sort_pairs(index: Tensor, num_experts: int, *, dependent: bool = False) -> tuple[Tensor, Tensor]:
    """Ends int32 [E] and rows int32 [T k] of index [T, k]."""
    pairs = index.numel()
    if pairs > MANY_PAIRS:
        return launch_sort_tiles(index, num_experts, BLOCK_PAIRS)[:2]
    ends, rows = (torch.empty(n, dtype=torch.int32, device=index.device) for n in (num_experts, pairs))
    block = min(4096, max(32, next_power_of_2(pairs)))
    sort_pairs_kernel[(num_experts + 1,)](
        index, ends, rows, pairs, num_experts, BLOCK=block, DEPENDENT=dependent,
        num_warps=1 if block <= 128 else 4 if block <= 1024 else 8, **pdl_options(dependent),
    )  # fmt: skip
    return ends, rows


def launch_sort_tiles(index: Tensor, num_experts: int, block_m: int) -> SortedPairs:
    """Pairs of index [T, k] sorted, and tiles of up to block_m pairs of one expert each."""
    pairs = index.numel()
    blocks, experts, most = cdiv(pairs, BLOCK_PAIRS), next_power_of_2(num_experts + 1), pairs // block_m + num_experts

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=index.device)

    counts, result = new(blocks, experts), SortedPairs(new(num_experts), new(pairs), new(2, 1 + most))
    sizes = {"BLOCK": BLOCK_PAIRS, "EXPERTS": experts}
    count_pairs_kernel[(blocks,)](index, counts, pairs, num_experts, **sizes, num_warps=4)
    place_pairs_kernel[(blocks,)](
        index, counts, *result, pairs, blocks, num_experts, most, **sizes, ROWS=max(1, COUNTS // experts), BLOCK_M=block_m,
        num_warps=8,
    )  # fmt: skip
    return result
