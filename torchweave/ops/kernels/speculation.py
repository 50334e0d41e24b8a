"""Triton kernels of speculative decoding: prompt lookup, inputs of a draft model and of rows with drafts, acceptance.

`torchweave.ops.speculation` describes the tensors and has the CPU versions. Nothing is specialized on values that change between
steps.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import DraftRows, SlotTensors
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2
from torchweave.ops.kernels.step_io import INT_MIN, cache_slot
from torchweave.ops.slot_fields import INDEX, SAMPLED


class DraftingSlots(SlotTensors, Protocol):
    """Regions and sizes of `torchweave.ops.slot_state.SlotState` that the kernels use."""

    last_token: Tensor
    draft_limit: Tensor
    draft_computed: Tensor
    history: Tensor
    block_table: Tensor
    num_tables: int
    history_len: int
    max_blocks_per_seq: int


_TOKENS = 1024  # tokens of a history that a program compares at a time
_SPLITS = 16  # programs for each history
_ROWS = 128
_ALL_ROWS = 1024  # rows whose tokens a program counts at a time
_LENGTH_SHIFT = tl.constexpr(32)  # a match as an int64: its length above the index of its last token


@triton.jit
def propose_kernel(
    history, position, draft_limit, slots, matches, history_len,
    MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """matches[row] = the best match of the row's history, which is longer, then later than others; 0 for none."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    last = tl.load(position + slot)
    if tl.load(draft_limit + slot) <= last:
        return
    text = history + slot.to(tl.int64) * history_len
    best = tl.zeros([BLOCK], tl.int64)
    for first in range(tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
        end = first + tl.arange(0, BLOCK)
        same = end < last
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_NGRAM):
            inside = same & (end >= back)
            token = tl.load(text + end - back, mask=inside, other=-1)
            wanted = tl.load(text + last - back, mask=last >= back, other=-2)
            same = inside & (token == wanted)
            length += same.to(tl.int64)
        match = (length << _LENGTH_SHIFT) + end
        best = tl.where(length >= MIN_NGRAM, tl.maximum(best, match), best)
    most = tl.max(best, axis=0)
    if most > 0:
        tl.atomic_max(matches + row, most)


@triton.jit
def _num_drafts(slots, position, draft_limit, matches, row, inside, K: tl.constexpr, SYNTHETIC: tl.constexpr):
    """Drafts of rows: as many as its limit allows, if there is a match."""
    slot = tl.load(slots + row, mask=inside, other=-1)
    running = slot >= 0
    room = tl.load(draft_limit + slot, mask=running, other=-1) - tl.load(position + slot, mask=running, other=0)
    has_drafts = running
    if not SYNTHETIC:
        has_drafts = running & (tl.load(matches + row, mask=inside, other=0) > 0)
    return slot, tl.where(has_drafts, tl.maximum(tl.minimum(room, K), 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def prepare_drafts_kernel(
    last_token, position, draft_limit, history, block_table, slots, matches,
    model_tokens, drafts, num_drafts, query_start, logits_index, entries, ids, positions, seq_lens, slot_mapping,
    num_rows, history_len, max_blocks, table_stride, mapping_stride, model_stride,
    K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_SIZE: tl.constexpr, TABLES: tl.constexpr, BLOCK_R: tl.constexpr,
    SYNTHETIC: tl.constexpr, FROM_MODEL: tl.constexpr,
):  # fmt: skip
    """One program per row, and one for the padded tokens after the last row."""
    Q: tl.constexpr = K + 1
    row = tl.program_id(0)
    start = 0
    for first in range(0, row, BLOCK_R):
        others = first + tl.arange(0, BLOCK_R)
        before = others < row
        slot, count = _num_drafts(slots, position, draft_limit, matches, others, before, K, SYNTHETIC)
        start += tl.sum(tl.where(slot >= 0, count + 1, 0), axis=0)
    tl.store(query_start + row, start)
    place = tl.arange(0, BLOCK_Q)
    if row == num_rows:
        for first in range(start, num_rows * Q, BLOCK_R):
            token = first + tl.arange(0, BLOCK_R)
            padded = token < num_rows * Q
            tl.store(ids + token, tl.zeros([BLOCK_R], tl.int64), mask=padded)
            tl.store(positions + token, tl.zeros([BLOCK_R], tl.int64), mask=padded)
            for table in tl.static_range(TABLES):
                tl.store(slot_mapping + table * mapping_stride + token, tl.full([BLOCK_R], -1, tl.int64), mask=padded)
    else:
        slot, count = _num_drafts(slots, position, draft_limit, matches, row, row < num_rows, K, SYNTHETIC)
        running = slot >= 0
        length = tl.where(running, count + 1, 0)
        last = tl.load(position + slot, mask=running, other=0)
        token = tl.load(last_token + slot, mask=running, other=0)
        is_draft = (place > 0) & (place < length)
        if FROM_MODEL:
            # An invalid token is no index of an embedding.
            draft = tl.maximum(tl.load(model_tokens + (place - 1) * model_stride + row, mask=is_draft, other=0), 0)
        else:
            match = tl.load(matches + row)
            end = (match & 0x7FFFFFFF).to(tl.int32)
            period = tl.maximum(last - end, 1)
            source = history + slot.to(tl.int64) * history_len + end + 1 + (place - 1) % period
            draft = tl.load(source, mask=is_draft & (match > 0), other=0)
            draft = tl.where(match > 0, draft, token)
        tl.store(drafts + row * K + place - 1, draft, mask=is_draft)
        tl.store(num_drafts + row, count)
        inside = place < length
        at = last + place
        input_id = tl.where(place == 0, token, draft)
        tl.store(ids + start + place, input_id.to(tl.int64), mask=inside)
        tl.store(positions + start + place, at.to(tl.int64), mask=inside)
        for table in tl.static_range(TABLES):
            mapped = cache_slot(block_table + table * table_stride, slot, at, max_blocks, inside, BLOCK_SIZE)
            tl.store(slot_mapping + table * mapping_stride + start + place, mapped, mask=inside)
        tl.store(seq_lens + row, tl.where(running, last + length, 0))
        index = start + tl.minimum(place, tl.maximum(length - 1, 0))
        tl.store(logits_index + row * Q + place, index.to(tl.int64), mask=place < Q)
        tl.store(entries + row * Q + place, tl.where(inside, row * Q + place, -1), mask=place < Q)


@triton.jit(do_not_specialize=["num_entries"])
def gather_kernel(
    slots, entries, fields, stride, stop_ids, to_fields, to_stride, to_stop_ids, num_entries,
    POSITION: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    Q: tl.constexpr, NUM_STOP_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sampler's parameters of each entry, the fields FIRST to LAST, from its row's slot."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    drawn = tl.load(entries + entry, mask=entry < num_entries, other=-1) >= 0
    slot = tl.load(slots + entry // Q, mask=drawn, other=0)
    at = tl.load(fields + POSITION * stride + slot, mask=drawn, other=0) + entry % Q
    tl.store(to_fields + POSITION * to_stride + entry, at, mask=drawn)
    for field in tl.static_range(FIRST, LAST + 1):
        value = tl.load(fields + field * stride + slot, mask=drawn, other=0)
        tl.store(to_fields + field * to_stride + entry, value, mask=drawn)
    for i in tl.static_range(NUM_STOP_IDS):
        stop = tl.load(stop_ids + slot * NUM_STOP_IDS + i, mask=drawn, other=-1)
        tl.store(to_stop_ids + entry * NUM_STOP_IDS + i, stop, mask=drawn)


@triton.jit
def _synthetic_word(position):
    """`torchweave.ops.speculation.synthetic_words`."""
    word = position.to(tl.uint32) * 0x9E3779B1
    word = word ^ (word >> 15)
    word = word * 0x85EBCA77
    return (word ^ (word >> 13)).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def accept_kernel(
    tokens, drafts, num_drafts, matches, slots, last_token, position, min_position, stop_ids, history, draft_computed, out,
    num_rows, history_len, threshold,
    K: tl.constexpr, NUM_STOP_IDS: tl.constexpr, BLOCK: tl.constexpr, SYNTHETIC: tl.constexpr, FROM_MODEL: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = K + 1
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    running = slot >= 0
    count = tl.load(num_drafts + row, mask=inside, other=0)
    tl.store(out + num_rows * Q + row, count, mask=inside)
    before = tl.load(position + slot, mask=running, other=0)
    at = before
    token = tl.load(last_token + slot, mask=running, other=0)
    first_stop = tl.load(min_position + slot, mask=running, other=0)
    alive = running
    for place in tl.static_range(Q):
        drawn = tl.load(tokens + row * Q + place, mask=alive, other=0)
        at = tl.where(alive, at + 1, at)
        right = alive & (place < count)
        if place < K:
            draft = tl.load(drafts + row * K + place, mask=right, other=-1)
            if SYNTHETIC:
                right = right & (_synthetic_word(at) < threshold)
                drawn = tl.where(right, draft, drawn)
            else:
                right = right & (draft == drawn)
        is_stop = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(NUM_STOP_IDS):
            stop = tl.load(stop_ids + slot * NUM_STOP_IDS + i, mask=alive, other=-1)
            is_stop |= (stop == drawn).to(tl.int32)
        stops = (is_stop != 0) & (at >= first_stop)
        known = tl.maximum(drawn, 0)  # an invalid token is no index of an embedding
        token = tl.where(alive, known, token)
        tl.store(history + slot.to(tl.int64) * history_len + at, known, mask=alive & (at < history_len))
        encoded = tl.where(alive, tl.where(stops, -1 - drawn, drawn), INT_MIN)
        tl.store(out + row * Q + place, encoded, mask=inside)
        alive = right & (stops == 0)
    tl.store(last_token + slot, token, mask=running)
    tl.store(position + slot, at, mask=running)
    if FROM_MODEL:
        match = tl.load(matches + row, mask=inside, other=0)
        computed = (tl.abs(match) - 1).to(tl.int32)
        if SHIFT == 0:
            computed = tl.where(count > 0, before + tl.minimum(at - before, count), computed)
        tl.store(draft_computed + slot, computed, mask=running & (match != 0))
    tl.store(matches + row, tl.zeros([BLOCK], tl.int64), mask=inside)


@triton.jit
def _missing(slots, position, draft_limit, draft_computed, row, inside, most, SHIFT: tl.constexpr):
    """Slot, last position and room for drafts of rows, and the first and the number of positions that a draft model computes."""
    slot = tl.load(slots + row, mask=inside, other=-1)
    running = slot >= 0
    last = tl.load(position + slot, mask=running, other=0)
    room = tl.load(draft_limit + slot, mask=running, other=-1) - last
    last -= SHIFT
    first = tl.minimum(tl.load(draft_computed + slot, mask=running, other=0), last)
    length = tl.where(running & (room > 0) & (last >= 0), tl.minimum(last + 1 - first, most), 0)
    return slot, last, room, first, length


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "most"])
def catch_up_kernel(
    position, draft_limit, draft_computed, history, block_table, slots,
    matches, num_drafts, query_start, logits_index, entries, model_entries, ids, positions, seq_lens, slot_mapping,
    num_rows, num_tokens, most, history_len, max_blocks, table_stride, mapping_stride, model_stride,
    K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_SIZE: tl.constexpr, TABLES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One program per row, and one for the padded tokens after the last row."""
    Q: tl.constexpr = K + 1
    row = tl.program_id(0)
    start = 0
    for begin in range(0, row, BLOCK_R):
        others = begin + tl.arange(0, BLOCK_R)
        _, _, _, _, lengths = _missing(slots, position, draft_limit, draft_computed, others, others < row, most, SHIFT)
        start += tl.sum(lengths, axis=0)
    tl.store(query_start + row, start)
    offset = tl.arange(0, BLOCK)
    if row == num_rows:
        for begin in range(start, num_tokens, BLOCK):
            token = begin + offset
            padded = token < num_tokens
            tl.store(ids + token, tl.zeros([BLOCK], tl.int64), mask=padded)
            tl.store(positions + token, tl.zeros([BLOCK], tl.int64), mask=padded)
            for table in tl.static_range(TABLES):
                tl.store(slot_mapping + table * mapping_stride + token, tl.full([BLOCK], -1, tl.int64), mask=padded)
    else:
        slot, last, room, first, length = _missing(
            slots, position, draft_limit, draft_computed, row, row < num_rows, most, SHIFT
        )
        end = first + length
        ready = (length > 0) & (end > last)
        match = tl.where(ready, end + 1, tl.where(length > 0, -end - 1, 0))
        tl.store(matches + row, match.to(tl.int64))
        count = tl.where(ready, tl.minimum(room, K), 0)
        tl.store(num_drafts + row, count)
        tl.store(seq_lens + row, tl.where(length > 0, end, 0))
        tl.store(logits_index + row, tl.maximum(start + length - 1, 0).to(tl.int64))
        place = tl.arange(0, BLOCK_Q)
        entry = tl.where(place < count, row * Q + place, -1)
        tl.store(entries + row * Q + place, entry, mask=place < Q)
        tl.store(model_entries + place * model_stride + row, entry, mask=place < K)
        text = history + slot.to(tl.int64) * history_len
        for begin in range(0, length, BLOCK):
            inside = begin + offset < length
            at = first + begin + offset
            token = start + begin + offset
            tl.store(ids + token, tl.load(text + at + SHIFT, mask=inside, other=0).to(tl.int64), mask=inside)
            tl.store(positions + token, at.to(tl.int64), mask=inside)
            for table in tl.static_range(TABLES):
                mapped = cache_slot(block_table + table * table_stride, slot, at, max_blocks, inside, BLOCK_SIZE)
                tl.store(slot_mapping + table * mapping_stride + token, mapped, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def finish_catch_up_kernel(slots, matches, draft_computed, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    match = tl.load(matches + row, mask=row < num_rows, other=0)
    slot = tl.load(slots + row, mask=match != 0, other=0)
    tl.store(draft_computed + slot, (tl.abs(match) - 1).to(tl.int32), mask=match != 0)
    tl.store(matches + row, tl.zeros([BLOCK], tl.int64), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "place"])
def feed_draft_kernel(
    position, block_table, slots, num_drafts, tokens, model_slots, ids, positions, seq_lens, slot_mapping,
    num_rows, place, max_blocks, table_stride, mapping_stride,
    BLOCK_SIZE: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    active = tl.load(num_drafts + row, mask=inside, other=0) > place
    slot = tl.load(slots + row, mask=active, other=-1)
    at = tl.where(active, tl.load(position + slot, mask=active, other=0) + place - SHIFT, 0)
    token = tl.maximum(tl.load(tokens + row, mask=active, other=0), 0)  # an invalid token is no index of an embedding
    tl.store(model_slots + row, slot, mask=inside)
    tl.store(ids + row, token.to(tl.int64), mask=inside)
    tl.store(positions + row, at.to(tl.int64), mask=inside)
    tl.store(seq_lens + row, tl.where(active, at + 1, 0), mask=inside)
    for table in tl.static_range(TABLES):
        mapped = cache_slot(block_table + table * table_stride, slot, at, max_blocks, active, BLOCK_SIZE)
        tl.store(slot_mapping + table * mapping_stride + row, mapped, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "query_start"])
def note_computed_kernel(slots, query_start, positions, position, draft_computed, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    start = tl.load(query_start + row, mask=inside, other=0)
    filled = (slot >= 0) & (tl.load(query_start + row + 1, mask=inside, other=0) > start)
    first = tl.load(positions + start, mask=filled, other=0).to(tl.int32)
    computed = tl.load(draft_computed + slot, mask=filled, other=0)
    end = tl.maximum(tl.load(position + slot, mask=filled, other=0) + 1, computed)
    tl.store(draft_computed + slot, end, mask=filled & (first <= computed))


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["slots", "query_start", "positions"]
)
def next_tokens_kernel(
    slots, query_start, positions, history, out, num_rows, num_tokens, history_len, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per row, and one for the padded tokens after the last row."""
    row = tl.program_id(0)
    start = tl.load(query_start + row)
    end = tl.load(query_start + row + 1, mask=row < num_rows, other=num_tokens)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    text = history + slot.to(tl.int64) * history_len
    for begin in range(start, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < end
        behind = tl.load(positions + token, mask=inside, other=0) + 1
        known = inside & (slot >= 0) & (behind < history_len)
        found = tl.load(text + behind, mask=known, other=0)
        tl.store(
            out + token, tl.maximum(found, 0).to(tl.int64), mask=inside
        )  # a slot without drafts may have no history


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "emit"])
def record_kernel(slots, emit, last_token, position, history, num_rows, history_len, BLOCK: tl.constexpr):
    """The history of each row that emitted a token takes it."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    emitted = tl.load(emit + row, mask=inside, other=0).to(tl.int32) != 0
    active = emitted & (slot >= 0)
    at = tl.load(position + slot, mask=active, other=0)
    token = tl.load(last_token + slot, mask=active, other=0)
    tl.store(history + slot.to(tl.int64) * history_len + at, token, mask=active & (at < history_len))


def launch_propose(state: DraftingSlots, slots: Tensor, min_ngram: int, max_ngram: int, matches: Tensor) -> None:
    splits = min(_SPLITS, cdiv(state.history_len, _TOKENS))
    propose_kernel[(slots.numel(), splits)](
        state.history, state.position, state.draft_limit, slots, matches, state.history_len,
        MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, BLOCK=_TOKENS, num_warps=4,
    )  # fmt: skip


def launch_prepare_drafts(
    state: DraftingSlots, sampled: SlotTensors, slots: Tensor, rows: DraftRows, inputs: Sequence[Tensor], block_size: int,
    synthetic: bool, from_model: bool,
) -> None:  # fmt: skip
    num_rows = slots.numel()
    prepare_drafts_kernel[(num_rows + 1,)](
        state.last_token, state.position, state.draft_limit, state.history, state.block_table, slots, rows.matches,
        rows.model_tokens, rows.drafts, rows.num_drafts, rows.query_start, rows.logits_index, rows.entries, *inputs,
        num_rows, state.history_len, *_table_sizes(state, inputs[3]), rows.model_tokens.stride(0),
        K=rows.query_len - 1, BLOCK_Q=next_power_of_2(rows.query_len), BLOCK_SIZE=block_size, TABLES=state.num_tables,
        BLOCK_R=_ALL_ROWS, SYNTHETIC=synthetic and not from_model, FROM_MODEL=from_model, num_warps=4,
    )  # fmt: skip
    _launch_gather(state, sampled, slots, rows)


def launch_catch_up(
    state: DraftingSlots, sampled: SlotTensors, slots: Tensor, rows: DraftRows, inputs: Sequence[Tensor], block_size: int,
    most: int, shift: int,
) -> None:  # fmt: skip
    num_rows = slots.numel()
    catch_up_kernel[(num_rows + 1,)](
        state.position, state.draft_limit, state.draft_computed, state.history, state.block_table, slots, rows.matches,
        rows.num_drafts, rows.query_start, rows.logits_index, rows.entries, rows.model_entries, *inputs,
        num_rows, num_rows * most, most, state.history_len, *_table_sizes(state, inputs[3]), rows.model_entries.stride(0),
        K=rows.query_len - 1, BLOCK_Q=next_power_of_2(rows.query_len), BLOCK_SIZE=block_size, TABLES=state.num_tables,
        BLOCK_R=_ALL_ROWS, BLOCK=_ROWS, SHIFT=shift, num_warps=4,
    )  # fmt: skip
    _launch_gather(state, sampled, slots, rows)


def launch_finish_catch_up(state: DraftingSlots, slots: Tensor, rows: DraftRows) -> None:
    num_rows = slots.numel()
    grid = (cdiv(num_rows, _ROWS),)
    finish_catch_up_kernel[grid](slots, rows.matches, state.draft_computed, num_rows, BLOCK=_ROWS, num_warps=4)


def launch_feed_draft(
    state: DraftingSlots,
    slots: Tensor,
    rows: DraftRows,
    place: int,
    inputs: Sequence[Tensor],
    block_size: int,
    shift: int,
) -> None:
    num_rows = slots.numel()
    feed_draft_kernel[(cdiv(num_rows, _ROWS),)](
        state.position, state.block_table, slots, rows.num_drafts, rows.model_tokens[place - 1], rows.model_slots, *inputs,
        num_rows, place, *_table_sizes(state, inputs[3]),
        BLOCK_SIZE=block_size, TABLES=state.num_tables, BLOCK=_ROWS, SHIFT=shift, num_warps=4,
    )  # fmt: skip


def launch_next_tokens(
    state: DraftingSlots, slots: Tensor, query_start: Tensor, positions: Tensor, out: Tensor
) -> None:
    num_rows, num_tokens = slots.numel(), positions.numel()
    next_tokens_kernel[(num_rows + 1,)](
        slots, query_start, positions, state.history, out, num_rows, num_tokens, state.history_len,
        BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def launch_note_computed(state: DraftingSlots, slots: Tensor, query_start: Tensor, positions: Tensor) -> None:
    num_rows = slots.numel()
    note_computed_kernel[(cdiv(num_rows, _ROWS),)](
        slots, query_start, positions, state.position, state.draft_computed, num_rows, BLOCK=_ROWS, num_warps=4
    )


def _table_sizes(state: DraftingSlots, slot_mapping: Tensor) -> tuple[int, int, int]:
    """Width of a block table, and the distances between tables and between slot mappings."""
    mapping_stride = 0 if state.num_tables == 1 else slot_mapping.stride(0)
    return state.max_blocks_per_seq, state.block_table.numel() // state.num_tables, mapping_stride


def _launch_gather(state: DraftingSlots, sampled: SlotTensors, slots: Tensor, rows: DraftRows) -> None:
    query_len, num_entries = rows.query_len, slots.numel() * rows.query_len
    gather_kernel[(cdiv(num_entries, _ROWS),)](
        slots, rows.entries, state.arena, state.field_stride, state.stop_ids, sampled.arena, sampled.field_stride,
        sampled.stop_ids, num_entries, POSITION=INDEX["position"], FIRST=INDEX[SAMPLED[0]], LAST=INDEX[SAMPLED[-1]],
        Q=query_len, NUM_STOP_IDS=state.stop_ids.shape[1], BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def launch_accept(
    state: DraftingSlots, slots: Tensor, rows: DraftRows, threshold: int, from_model: bool, shift: int
) -> None:
    num_rows = slots.numel()
    accept_kernel[(cdiv(num_rows, _ROWS),)](
        rows.tokens, rows.drafts, rows.num_drafts, rows.matches, slots,
        state.last_token, state.position, state.min_position, state.stop_ids, state.history, state.draft_computed, rows.out,
        num_rows, state.history_len, threshold,
        K=rows.query_len - 1, NUM_STOP_IDS=state.stop_ids.shape[1], BLOCK=_ROWS, SYNTHETIC=threshold >= 0,
        FROM_MODEL=from_model, SHIFT=shift, num_warps=4,
    )  # fmt: skip


def launch_record(state: DraftingSlots, slots: Tensor, emit: Tensor) -> None:
    num_rows = slots.numel()
    emit = emit.view(torch.uint8) if emit.dtype == torch.bool else emit
    record_kernel[(cdiv(num_rows, _ROWS),)](
        slots, emit, state.last_token, state.position, state.history, num_rows, state.history_len,
        BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip
