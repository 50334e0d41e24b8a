"""Triton kernels around the model in a step: prepare inputs, advance slots, scatter changed state, copy to and from pinned
memory.

Kernels are not specialized on values that change between steps (sizes, alignment of slices of a packed buffer), so that none is
compiled after start-up.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.sizes import cdiv

INT_MIN = tl.constexpr(-(2**31))
_TOKENS = 1024  # tokens that one program handles at a time
_ROWS = 128
_PAIRS = 256
_COPY_BLOCK = 1024
_UNALIGNED = ["slots", "query_start", "host_ids", "host_positions", "tokens", "emit"]
_UNALIGNED += ["out", "ids", "positions", "seq_lens", "slot_mapping"]


@triton.jit
def cache_slot(block_table, slot, position, max_blocks, valid, BLOCK_SIZE: tl.constexpr):
    """Cache slot of `position`, or -1 if it is invalid, has no block, or lies beyond the table."""
    column = position // BLOCK_SIZE
    valid = valid & (position >= 0) & (column < max_blocks)
    block = tl.load(block_table + slot.to(tl.int64) * max_blocks + column, mask=valid, other=-1)
    mapped = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    return tl.where(valid & (block >= 0), mapped, -1)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=_UNALIGNED)
def prepare_kernel(
    last_token, position, block_table,
    slots, query_start, host_ids, host_positions,
    ids, positions, seq_lens, slot_mapping,
    num_rows, num_tokens, max_blocks, table_stride, mapping_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    """One program per row, and one for the padded tokens after the last row. Each of TABLES block tables, `table_stride`
    apart, has a slot mapping, `mapping_stride` apart."""
    row = tl.program_id(0)
    start = tl.load(query_start + row)
    if row == num_rows:
        for first in range(start, num_tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            padded = token < num_tokens
            tl.store(ids + token, tl.zeros([BLOCK], tl.int64), mask=padded)
            tl.store(positions + token, tl.zeros([BLOCK], tl.int64), mask=padded)
            for table in tl.static_range(TABLES):
                tl.store(slot_mapping + table * mapping_stride + token, tl.full([BLOCK], -1, tl.int64), mask=padded)
    else:
        end = tl.load(query_start + row + 1)
        slot = tl.load(slots + row)
        has_tokens = (end > start) & (slot >= 0)
        slot_token = tl.load(last_token + slot, mask=has_tokens, other=0)
        slot_position = tl.load(position + slot, mask=has_tokens, other=0)
        final_id = tl.load(host_ids + end - 1, mask=has_tokens, other=0)
        final_position = tl.load(host_positions + end - 1, mask=has_tokens, other=0).to(tl.int32)
        final_position = tl.where(final_id < 0, slot_position, final_position)
        for first in range(start, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            inside = token < end
            host_id = tl.load(host_ids + token, mask=inside, other=0).to(tl.int32)
            at = tl.load(host_positions + token, mask=inside, other=0).to(tl.int32)
            at = tl.where(host_id < 0, slot_position, at)
            tl.store(ids + token, tl.where(host_id < 0, slot_token, host_id).to(tl.int64), mask=inside)
            tl.store(positions + token, at.to(tl.int64), mask=inside)
            for table in tl.static_range(TABLES):
                rows = block_table + table * table_stride
                mapped = cache_slot(rows, slot, at, max_blocks, inside & has_tokens, BLOCK_SIZE)
                tl.store(slot_mapping + table * mapping_stride + token, mapped, mask=inside)
        tl.store(seq_lens + row, tl.where(has_tokens, final_position + 1, 0))
        tl.store(position + slot, final_position, mask=has_tokens)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
def prepare_decode_kernel(
    last_token, position, block_table, slots,
    ids, positions, seq_lens, slot_mapping,
    num_rows, max_blocks, table_stride, mapping_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    running = slot >= 0
    at = tl.load(position + slot, mask=running, other=0)
    token = tl.load(last_token + slot, mask=running, other=0)
    tl.store(ids + row, token.to(tl.int64), mask=inside)
    tl.store(positions + row, at.to(tl.int64), mask=inside)
    tl.store(seq_lens + row, tl.where(running, at + 1, 0), mask=inside)
    for table in tl.static_range(TABLES):
        mapped = cache_slot(block_table + table * table_stride, slot, at, max_blocks, running, BLOCK_SIZE)
        tl.store(slot_mapping + table * mapping_stride + row, mapped, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
def advance_kernel(
    tokens, slots, emit, last_token, position, min_position, stop_ids, out, num_rows,
    NUM_STOP_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    emitted = tl.load(emit + row, mask=inside, other=0).to(tl.int32) != 0
    active = emitted & (slot >= 0)
    token = tl.load(tokens + row, mask=inside, other=0).to(tl.int32)
    at = tl.load(position + slot, mask=active, other=0) + 1
    is_stop = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(NUM_STOP_IDS):
        stop = tl.load(stop_ids + slot * NUM_STOP_IDS + i, mask=active, other=-1)
        is_stop |= (stop == token).to(tl.int32)
    may_stop = at >= tl.load(min_position + slot, mask=active, other=0)
    encoded = tl.where((is_stop != 0) & may_stop, -1 - token, token)
    tl.store(last_token + slot, tl.maximum(token, 0), mask=active)  # an invalid token is no index of an embedding
    tl.store(position + slot, at, mask=active)
    tl.store(out + row, tl.where(active, encoded, INT_MIN), mask=inside)


@triton.jit(do_not_specialize=["count"])
def scatter_kernel(arena, pairs, count, BLOCK: tl.constexpr):
    """arena[pairs[i]] = pairs[count + i] for i < count; the indices are distinct."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    index = tl.load(pairs + i, mask=inside, other=0)
    tl.store(arena + index, tl.load(pairs + count + i, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def pinned_copy_kernel(source, target, count, BLOCK: tl.constexpr):
    """target[i] = source[i] for i < count."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def _tables(slot_mapping: Tensor) -> int:
    return 1 if slot_mapping.dim() == 1 else slot_mapping.shape[0]


def _strides(block_table: Tensor, slot_mapping: Tensor) -> tuple[int, int]:
    """Distance between block tables, and between slot mappings."""
    return block_table.numel() // _tables(slot_mapping), 0 if slot_mapping.dim() == 1 else slot_mapping.stride(0)


def launch_prepare(
    last_token: Tensor, position: Tensor, block_table: Tensor,
    slots: Tensor, query_start: Tensor, host_ids: Tensor, host_positions: Tensor,
    ids: Tensor, positions: Tensor, seq_lens: Tensor, slot_mapping: Tensor, block_size: int,
) -> None:  # fmt: skip
    rows = slots.numel()
    prepare_kernel[(rows + 1,)](
        last_token, position, block_table, slots, query_start, host_ids, host_positions,
        ids, positions, seq_lens, slot_mapping, rows, ids.numel(), block_table.shape[1], *_strides(block_table, slot_mapping),
        TABLES=_tables(slot_mapping), BLOCK_SIZE=block_size, BLOCK=_TOKENS, num_warps=4,
    )  # fmt: skip


def launch_prepare_decode(
    last_token: Tensor, position: Tensor, block_table: Tensor, slots: Tensor,
    ids: Tensor, positions: Tensor, seq_lens: Tensor, slot_mapping: Tensor, block_size: int,
) -> None:  # fmt: skip
    rows = slots.numel()
    prepare_decode_kernel[(cdiv(rows, _ROWS),)](
        last_token, position, block_table, slots, ids, positions, seq_lens, slot_mapping,
        rows, block_table.shape[1], *_strides(block_table, slot_mapping),
        TABLES=_tables(slot_mapping), BLOCK_SIZE=block_size, BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def launch_advance(
    tokens: Tensor, slots: Tensor, emit: Tensor,
    last_token: Tensor, position: Tensor, min_position: Tensor, stop_ids: Tensor, out: Tensor,
) -> None:  # fmt: skip
    rows = slots.numel()
    emit = emit.view(torch.uint8) if emit.dtype == torch.bool else emit
    advance_kernel[(cdiv(rows, _ROWS),)](
        tokens, slots, emit, last_token, position, min_position, stop_ids, out, rows,
        NUM_STOP_IDS=stop_ids.shape[1], BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def launch_scatter(arena: Tensor, pairs: Tensor, count: int) -> None:
    scatter_kernel[(cdiv(count, _PAIRS),)](arena, pairs, count, BLOCK=_PAIRS, num_warps=4)


def launch_pinned_copy(source: Tensor, target: Tensor) -> None:
    count = source.numel()
    pinned_copy_kernel[(cdiv(count, _COPY_BLOCK),)](source, target, count, BLOCK=_COPY_BLOCK, num_warps=4)
