"""Triton: write a step's keys and values to the paged cache; flash attention over it for rows with several new tokens.

The device finds the row of a program, so that a CUDA graph may hold the launch for any rows: with BQ tokens a tile, row i's
tiles begin at `query_start[i] // BQ + i`, and `cdiv(T, BQ) + R` programs are always enough. The padded tokens after the last
row are one more row, whose tiles write zeros. The query heads that share a key head are packed into the rows of one tile. A
tile's keys are walked in up to three loops; the middle one, nearly all of a long context, needs no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.attention.kv_cache_dtype import quantize_kv
from torchweave.ops.kernels.attention.paged_decode import (
    LOG2_E,
    LOWEST,
    apply_gate,
    cache_slots,
    first_visible_key,
    load_blocks,
    softcap_log2,
)
from torchweave.ops.kernels.find_row import find_row, uniform


@triton.jit
def write_kv(
    k, v, k_cache, v_cache, slot_mapping,
    k_stride, k_head_stride, v_stride, v_head_stride, k_scale, v_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KV_FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK channels of the key and value of token `program_id(0)` to its cache slot; slot -1 is skipped.
    KV_FP8_MAX: see `quantize_kv`."""
    token = tl.program_id(0).to(tl.int64)
    cache_slot = tl.load(slot_mapping + token)
    if cache_slot < 0:
        return
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < KV_HEADS * HEAD_DIM
    source = k + token * k_stride + offset // HEAD_DIM * k_head_stride + offset % HEAD_DIM
    key = quantize_kv(tl.load(source, mask=mask), k_scale, k_cache.dtype.element_ty, KV_FP8_MAX)
    tl.store(k_cache + cache_slot * (KV_HEADS * HEAD_DIM) + offset, key, mask=mask)
    mask = offset < KV_HEADS * VALUE_DIM
    source = v + token * v_stride + offset // VALUE_DIM * v_head_stride + offset % VALUE_DIM
    value = quantize_kv(tl.load(source, mask=mask), v_scale, v_cache.dtype.element_ty, KV_FP8_MAX)
    tl.store(v_cache + cache_slot * (KV_HEADS * VALUE_DIM) + offset, value, mask=mask)


@triton.jit
def _attend_tiles(
    acc, maximum, total, query, positions, last_visible, table_row, k_cache, v_cache, begin, end,
    scale, softcap, slope, window, chunk, first_visible,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LOCAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend keys `[begin, end)`, where `begin` is a multiple of BLOCK_N. Not MASKED: so is `end`, and all keys are visible.
    last_visible: the last key that each query sees, `[BLOCK_M]`. slope: ALiBi's slopes `[BLOCK_M]`, in units of log2(e).
    Blocks of keys below `first_visible` may belong to another sequence."""
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    blocks = load_blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N, False)
    for tile in tl.range(begin, end, BLOCK_N):
        tile = tl.multiple_of(tile, BLOCK_N)
        keys = tile + tl.arange(0, BLOCK_N)
        in_range = (keys < end) & (keys >= first_visible)
        key_slots = cache_slots(blocks, tile, BLOCK_SIZE, BLOCK_N)
        blocks = load_blocks(table_row, tile + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, False)
        k_at = k_cache + key_slots[:, None] * (KV_HEADS * HEAD_DIM) + dim[None, :]
        v_at = v_cache + key_slots[:, None] * (KV_HEADS * VALUE_DIM) + value_dim[None, :]
        if MASKED:
            k = tl.load(k_at, mask=in_range[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_PAD == HEAD_DIM:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee")
        scores = softcap_log2(scores * scale, softcap) if SOFTCAP else scores * (scale * LOG2_E)
        if ALIBI:
            scores += slope[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            visible = keys[None, :] <= last_visible[:, None]
            if LOCAL:
                visible &= keys[None, :] >= first_visible_key(positions, window, chunk)[:, None]
            scores = tl.where(visible & in_range[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        if MASKED:
            v = tl.load(v_at, mask=in_range[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        elif VALUE_PAD == VALUE_DIM:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
        v = v.to(query.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    return acc, maximum, total


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "window", "chunk"], do_not_specialize_on_alignment=["query_start"]
)
def paged_prefill(
    q, out, k_cache, v_cache, slots, query_start, seq_lens, block_table, sinks, slopes, lookahead, gate,
    num_rows, num_tokens, scale, v_scale, softcap, window, chunk, table_stride, q_stride, q_head_stride,
    gate_stride, gate_head_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, LOCAL: tl.constexpr, LOOKAHEAD: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One tile of `BLOCK_M // GROUP` tokens of one row, for one key head; the decode kernel runs rows with one token.
    scale, v_scale: of the scores over cached keys, and of the cached values.
    lookahead: see `AttentionMetadata`; read if LOOKAHEAD. GATED: multiply the results by the sigmoid of `gate`."""
    BQ: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first: a row's last tiles have the most keys
    row = find_row(query_start, tile, num_rows, BQ)
    start = tl.load(query_start + row)
    stop = tl.load(query_start + tl.minimum(row + 1, num_rows))
    stop = tl.where(row == num_rows, num_tokens, stop)
    count = stop - start
    first = (tile - (start // BQ + row)) * BQ  # of the tile's tokens, within the row
    if (first >= count) | ((count == 1) & (row < num_rows)):
        return

    packed = tl.arange(0, BLOCK_M)
    offset = first + packed // GROUP
    valid_rows = (packed < BQ * GROUP) & (offset < count)
    token = (start + offset).to(tl.int64)
    query_head = head * GROUP + packed % GROUP
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    out_at = out + (token * (KV_HEADS * GROUP) + query_head)[:, None] * VALUE_DIM + value_dim[None, :]
    out_mask = valid_rows[:, None] & (value_dim < VALUE_DIM)[None, :]
    if row == num_rows:
        tl.store(out_at, tl.zeros([BLOCK_M, VALUE_PAD], out.dtype.element_ty), mask=out_mask)
        return

    query = tl.load(
        q + (token * q_stride + query_head * q_head_stride)[:, None] + dim[None, :],
        mask=valid_rows[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    cached = tl.load(seq_lens + row) - count
    positions = cached + offset
    first_position = cached + first
    last_position = cached + tl.minimum(first + BQ, count) - 1
    last_visible = positions
    end = last_position + 1
    if LOOKAHEAD:
        last_visible += tl.load(lookahead + token, mask=valid_rows, other=0)
        end = tl.minimum(uniform(tl.max(tl.where(valid_rows, last_visible, 0), 0)) + 1, cached + count)
    table_row = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    k_cache += head * HEAD_DIM
    v_cache += head * VALUE_DIM
    maximum = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    if SINKS:
        maximum = tl.load(sinks + query_head, mask=valid_rows, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + query_head, mask=valid_rows, other=0.0) * LOG2_E

    # Keys [base, edge) are outside the window of some queries, [edge, diagonal) are visible to all, the rest is causal,
    # or visible to the tokens that look ahead.
    diagonal = (first_position + 1) // BLOCK_N * BLOCK_N
    first_visible = first_visible_key(first_position, window, chunk)
    edge = 0
    if LOCAL:
        base = first_visible // BLOCK_N * BLOCK_N
        reached = tl.cdiv(first_visible_key(last_position, window, chunk), BLOCK_N) * BLOCK_N
        edge = tl.maximum(tl.minimum(reached, diagonal), base)
        acc, maximum, total = _attend_tiles(
            acc, maximum, total, query, positions, last_visible, table_row, k_cache, v_cache, base, edge,
            scale, softcap, slope, window, chunk, first_visible, KV_HEADS, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE,
            BLOCK_N, SOFTCAP, ALIBI, LOCAL, True,
        )  # fmt: skip
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, query, positions, last_visible, table_row, k_cache, v_cache, edge, diagonal,
        scale, softcap, slope, window, chunk, first_visible, KV_HEADS, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE,
        BLOCK_N, SOFTCAP, ALIBI, LOCAL, False,
    )  # fmt: skip
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, query, positions, last_visible, table_row, k_cache, v_cache, diagonal, end,
        scale, softcap, slope, window, chunk, first_visible, KV_HEADS, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE,
        BLOCK_N, SOFTCAP, ALIBI, LOCAL, True,
    )  # fmt: skip
    result = acc / total[:, None] * v_scale
    if GATED:
        gates = gate + (token * gate_stride + query_head * gate_head_stride)[:, None] + value_dim[None, :]
        result = apply_gate(result, gates, out_mask, out.dtype.element_ty)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=out_mask)
