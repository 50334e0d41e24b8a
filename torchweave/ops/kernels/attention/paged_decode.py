"""Triton: attention of rows with one new token over the paged cache, split over the context.

Grid `(KH, splits, R)`. The grid fixes the number of splits, so a CUDA graph may hold the launch; the device computes from a
row's real length how many splits are used and which keys each takes. A program attends the query heads that share a key head
(packed into the rows of a matrix product) over its keys. The first split also takes the new token's key and value from the
inputs, and may write them into the cache. When a row uses several splits, each writes its partial result to a workspace; the
last split (by an atomic counter per row and key head) combines them and resets the counter.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.activation import activate
from torchweave.ops.kernels.attention.kv_cache_dtype import quantize_kv
from torchweave.ops.kernels.dependent_launch import pdl_prefetch, pdl_trigger, pdl_wait
from torchweave.ops.kernels.quant.fp8_quant import FP8_MAX, MIN_AMAX
from torchweave.ops.kernels.rope import load_heads_with_rope

LOG2_E = tl.constexpr(1.4426950408889634)
PREFETCH_MAX_ROWS = tl.constexpr(8)
"""Most rows with prefetched keys: programs that start after others have ended hide nothing by it (decision 0052)."""
LOWEST = tl.constexpr(-1.0e30)
"""Start of a running maximum: finite, so that rows without a visible key do not compute inf - inf."""


@triton.jit
def softcap_log2(scores, softcap):
    """`softcap * tanh(scores / softcap)` in units of log2(e); tanh by exp2, exact at both ends."""
    return softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))


@triton.jit
def first_visible_key(position, window, chunk):
    """First key that is visible at `position`; `window` and `chunk` 0 mean no limit."""
    first_visible = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return tl.maximum(first_visible, tl.where(chunk > 0, position // tl.maximum(chunk, 1) * chunk, 0))


@triton.jit
def load_blocks(table_row, tile, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PAST_L1: tl.constexpr):
    """Blocks of the keys of the tile that begins at `tile`: a scalar if a tile lies within a block, else one per key. Loops
    load them one tile ahead: an address that waits for a load would halve the depth of the pipeline.
    PAST_L1: do not keep them in L1."""
    if BLOCK_SIZE % BLOCK_N == 0:
        places, mask = table_row + tile // BLOCK_SIZE, tile < end
    else:
        keys = tile + tl.arange(0, BLOCK_N)
        places, mask = table_row + keys // BLOCK_SIZE, keys < end
    return tl.load(places, mask=mask, other=0, cache_modifier=".cg" if PAST_L1 else "")


@triton.jit
def cache_slots(blocks, tile, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache slots (int64 `[BLOCK_N]`) of the keys of a tile, from the result of `load_blocks`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return blocks.to(tl.int64) * BLOCK_SIZE + tile % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    return blocks.to(tl.int64) * BLOCK_SIZE + (tile + tl.arange(0, BLOCK_N)) % BLOCK_SIZE


@triton.jit
def _scores(q, k, DOT: tl.constexpr):
    if DOT:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)


@triton.jit
def _weighted(weights, v, DOT: tl.constexpr):
    if DOT:
        return tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return tl.sum(weights[:, :, None] * v.to(tl.float32)[None, :, :], 1)


@triton.jit
def apply_gate(result, gate, mask, dtype: tl.constexpr):
    """`result` times the sigmoid of the numbers at `gate`, each factor rounded to `dtype`; float32."""
    active = activate(tl.load(gate, mask=mask, other=0.0).to(tl.float32), "sigmoid")
    return active.to(dtype).to(tl.float32) * result.to(dtype).to(tl.float32)


@triton.jit
def _store_output(
    result, head, valid, out, out_scale, static_scale, gate, gate_stride, gate_head_stride, token, num_tokens,
    dtype: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, QUANT: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Store the results `[N, VALUE_PAD]` of `head` `[N]` of a token. GATED: times the sigmoid of `gate`. QUANT: 0 unquantized;
    1 FP8 with `static_scale`; 2 FP8 with a scale for each head, of 128 channels. See `fp8_quant.store_fp8`."""
    dim = tl.arange(0, VALUE_PAD)
    mask = valid[:, None] & (dim < VALUE_DIM)[None, :]
    if GATED:
        gates = gate + token * gate_stride + head[:, None] * gate_head_stride + dim[None, :]
        result = apply_gate(result, gates, mask, dtype)
    if QUANT > 0:
        result = result.to(dtype).to(tl.float32)
        if QUANT == 1:
            scale = tl.zeros_like(result) + tl.load(static_scale)
        else:
            size = tl.max(tl.where(mask, tl.abs(result), 0.0), 1)
            each = tl.div_rn(tl.maximum(size, MIN_AMAX), FP8_MAX)
            tl.store(out_scale + head.to(tl.int64) * num_tokens + token, each, mask=valid)
            scale = tl.broadcast_to(each[:, None], result.shape)
        result = tl.clamp(tl.div_rn(result, scale), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    at = out + (token * HEADS + head)[:, None] * VALUE_DIM + dim[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_splits(
    head, out, out_scale, static_scale, gate, gate_stride, gate_head_stride, token, num_tokens, partial, maxima, sums, first,
    used_splits, dtype: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, LOAD_SIZE: tl.constexpr, QUANT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Merge the partial results `[split, GROUP, VALUE_DIM]` of `used_splits` splits from `first` on into key head `head`.

    MEMBERS query heads and CHUNK splits at a time, at most LOAD_SIZE numbers, whose loads overlap.
    """
    MEMBERS: tl.constexpr = 4 if GROUP > 2 else GROUP
    CHUNK: tl.constexpr = max(min(LOAD_SIZE // (MEMBERS * VALUE_PAD), 32), 1)
    dim = tl.arange(0, VALUE_PAD)
    for first_member in tl.range(0, GROUP, MEMBERS):
        member = first_member + tl.arange(0, MEMBERS)
        maximum, total = tl.full([MEMBERS], LOWEST, tl.float32), tl.zeros([MEMBERS], tl.float32)
        acc = tl.zeros([MEMBERS, VALUE_PAD], tl.float32)
        for begin in tl.range(0, used_splits, CHUNK):
            split = begin + tl.arange(0, CHUNK)
            valid = (split < used_splits)[:, None] & (member < GROUP)[None, :]
            index = (first + split)[:, None] * GROUP + member[None, :]
            split_maxima = tl.load(maxima + index, mask=valid, other=LOWEST, cache_modifier=".cg")
            split_sums = tl.load(sums + index, mask=valid, other=1.0, cache_modifier=".cg")
            values = tl.load(
                partial + index[:, :, None] * VALUE_DIM + dim[None, None, :],
                mask=valid[:, :, None] & (dim < VALUE_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_maximum = tl.maximum(maximum, tl.max(split_maxima, 0))
            weights = tl.exp2(split_maxima - new_maximum[None, :])
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(split_sums * weights, 0)
            acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
            maximum = new_maximum
        _store_output(
            acc / total[:, None], head * GROUP + member, member < GROUP, out, out_scale, static_scale, gate, gate_stride,
            gate_head_stride, token, num_tokens, dtype, HEADS, VALUE_DIM, VALUE_PAD, QUANT, GATED,
        )  # fmt: skip


@triton.jit
def _attend_new_token(
    query, token, head, k_new, v_new, k_cache, v_cache, slot_mapping, sinks, scale, softcap,
    k_stride, k_head_stride, v_stride, v_head_stride, k_weight, cos, sin, eps, offset, k_scale, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    STORE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, KV_FP8_MAX: tl.constexpr,
):  # fmt: skip
    """The running softmax (maximum, total, sum of values) after the sinks and the new token; STORE: also cache the token. The
    token's key and value take the cache's dtype first, as later steps read them."""
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    first = tl.zeros([1, 1], tl.int32)
    key_row = k_new + token * k_stride + head * k_head_stride + first
    key = load_heads_with_rope(
        key_row, first == 0, k_weight, cos, sin, eps, offset, HEAD_DIM, HEAD_PAD, HALF, NORM, WIDE
    )
    key = tl.reshape(key, [HEAD_PAD])
    value = tl.load(v_new + token * v_stride + head * v_head_stride + value_dim, mask=value_dim < VALUE_DIM, other=0.0)
    key = quantize_kv(key, k_scale, k_cache.dtype.element_ty, KV_FP8_MAX)
    value = quantize_kv(value, v_scale, v_cache.dtype.element_ty, KV_FP8_MAX)
    if STORE:
        cache_slot = tl.load(slot_mapping + token)
        has_slot = cache_slot >= 0
        cache_slot = cache_slot * KV_HEADS + head
        tl.store(k_cache + cache_slot * HEAD_DIM + dim, key, mask=(dim < HEAD_DIM) & has_slot)
        tl.store(v_cache + cache_slot * VALUE_DIM + value_dim, value, mask=(value_dim < VALUE_DIM) & has_slot)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    maximum = softcap_log2(score, softcap) if SOFTCAP else score * LOG2_E
    total = tl.full([GROUP_PAD], 1.0, tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32) + value.to(tl.float32)[None, :]
    if SINKS:
        sink = tl.load(sinks + head * GROUP + group, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        total = tl.exp2(maximum - new_maximum)
        acc *= total[:, None]
        total += tl.exp2(sink - new_maximum)
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _keys_of_split(first_visible, position, split, num_splits, min_tiles, BLOCK_N: tl.constexpr):
    """Cached keys `[begin, end)` of a split, and the number of splits that have some, 1 at least."""
    base = first_visible // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(position - base, BLOCK_N)
    # Combining costs as much as a few tiles: a short context is not split.
    tiles_per_split = tl.where(tiles <= min_tiles, tl.maximum(tiles, 1), tl.cdiv(tiles, num_splits))
    used_splits = tl.maximum(tl.cdiv(tiles, tiles_per_split), 1)
    begin = base + split * tiles_per_split * BLOCK_N
    return begin, tl.minimum(begin + tiles_per_split * BLOCK_N, position), used_splits


@triton.jit
def _prefetch_tile(cache, rows, DIM: tl.constexpr, PAD: tl.constexpr, DEPENDENT: tl.constexpr):
    """Bring rows of a cache of keys or values into the L2 cache, before the wait."""
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
    lines = tl.minimum(tl.arange(0, (PAD + LINE - 1) // LINE) * LINE, DIM - 1)
    pdl_prefetch(cache + rows[:, None] * DIM + lines[None, :], DEPENDENT)


@triton.jit
def _attend_cached_tokens(
    maximum, total, acc, query, blocks, table_row, k_cache, v_cache, head, first_visible, begin, end, scale, softcap,
    slopes, query_head, position,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Continue a running softmax over the cached keys `[begin, end)` from `first_visible` on; `begin` is a multiple of BLOCK_N.
    blocks: of the first tile. ALIBI: bias scores by the slopes of `query_head` for a query at `position`."""
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    if ALIBI:
        slope = tl.load(slopes + query_head, mask=query_head < (head + 1) * GROUP, other=0.0) * LOG2_E
    for tile in tl.range(begin, end, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        visible = (keys >= first_visible) & (keys < end)
        key_slots = cache_slots(blocks, tile, BLOCK_SIZE, BLOCK_N)[:, None] * KV_HEADS + head
        blocks = load_blocks(table_row, tile + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, False)
        k_mask = visible[:, None] if HEAD_PAD == HEAD_DIM else visible[:, None] & (dim < HEAD_DIM)[None, :]
        v_mask = visible[:, None] if VALUE_PAD == VALUE_DIM else visible[:, None] & (value_dim < VALUE_DIM)[None, :]
        k = tl.load(k_cache + key_slots * HEAD_DIM + dim[None, :], mask=k_mask, other=0.0)
        v = tl.load(v_cache + key_slots * VALUE_DIM + value_dim[None, :], mask=v_mask, other=0.0)
        scores = _scores(query, k.to(query.dtype), DOT) * scale
        scores = softcap_log2(scores, softcap) if SOFTCAP else scores * LOG2_E
        if ALIBI:
            scores += slope[:, None] * (keys - position).to(tl.float32)[None, :]
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + _weighted(weights, v.to(query.dtype), DOT)
        maximum = new_maximum
    return maximum, total, acc


@triton.jit(
    do_not_specialize=["window", "chunk", "num_splits", "min_tiles", "num_tokens"],
    do_not_specialize_on_alignment=["query_start"],  # a slice of a packed tensor: its alignment depends on the rows
)
def paged_decode(
    q, k_new, v_new, out, k_cache, v_cache, slots, query_start, seq_lens, block_table, slot_mapping, sinks, slopes,
    partial, maxima, sums, counters, q_weight, k_weight, cos, sin, out_scale, static_scale, gate,
    scale, softcap, window, chunk, num_splits, min_tiles, eps, offset, k_scale, v_scale, num_tokens,
    table_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, gate_stride, gate_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LOAD_SIZE: tl.constexpr, DECODE_ONLY: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, DOT: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr, QUANT: tl.constexpr, GATED: tl.constexpr,
    KV_FP8_MAX: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one split.

    DECODE_ONLY: row i is token i, padding rows are zeroed, and K/V are written here; otherwise rows without exactly one token
        are left to the prefill kernel, and K/V are in the cache already.
    HALF: half of the rotary channels of a head, rotated here, after the norm if NORM; 0: q and k are rotated already.
    LOAD_SIZE: numbers of partial results in registers at once; 0 if `num_splits` is 1. DEPENDENT: see `dependent_launch.py`.
    QUANT, GATED: see `_store_output`. KV_FP8_MAX: see `quantize_kv`; `scale` then includes the scale of the cached keys.

    What only earlier kernels than the previous one have written is read before the wait (`dependent_launch.py`): the rows of the
    step, their blocks, and a program's first tile of cached keys and values, which are prefetched.
    """
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    length = tl.load(seq_lens + row, cache_modifier=".cg")
    token, has_one_token = row.to(tl.int64), True
    if not DECODE_ONLY:
        start = tl.load(query_start + row, cache_modifier=".cg")
        has_one_token = tl.load(query_start + row + 1, cache_modifier=".cg") - start == 1
        token = start.to(tl.int64)
    has_keys = has_one_token & (slot >= 0)
    position = tl.where(has_keys, length, 1) - 1  # of the new token; the cache holds the keys before it
    first_visible = first_visible_key(position, window, chunk)
    begin, end, used_splits = _keys_of_split(first_visible, position, split, num_splits, min_tiles, BLOCK_N)
    table_row = block_table + slot * table_stride
    blocks = load_blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N, True)
    if (begin < end) & (tl.num_programs(2) <= PREFETCH_MAX_ROWS):
        key_rows = cache_slots(blocks, begin, BLOCK_SIZE, BLOCK_N) * KV_HEADS + head
        _prefetch_tile(k_cache, key_rows, HEAD_DIM, HEAD_PAD, DEPENDENT)
        _prefetch_tile(v_cache, key_rows, VALUE_DIM, VALUE_PAD, DEPENDENT)
    pdl_wait(DEPENDENT)
    if not has_one_token:
        return
    group, value_dim = tl.arange(0, GROUP_PAD), tl.arange(0, VALUE_PAD)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    query_head = head * GROUP + group
    if slot < 0:
        if split == 0:
            _store_output(
                tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32), query_head, group < GROUP, out, out_scale, static_scale,
                gate, gate_stride, gate_head_stride, token, num_tokens, q.dtype.element_ty, HEADS, VALUE_DIM, VALUE_PAD, QUANT,
                False,
            )  # fmt: skip
        return
    if split >= used_splits:
        return

    cos, sin = cos + token * (2 * HALF), sin + token * (2 * HALF)
    query_rows = q + token * q_stride + (head * GROUP + group)[:, None] * q_head_stride
    query = load_heads_with_rope(
        query_rows, (group < GROUP)[:, None], q_weight, cos, sin, eps, offset, HEAD_DIM, HEAD_PAD, HALF, NORM, WIDE
    )
    maximum, total = tl.full([GROUP_PAD], LOWEST, tl.float32), tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    if split == 0:
        maximum, total, acc = _attend_new_token(
            query, token, head, k_new, v_new, k_cache, v_cache, slot_mapping, sinks, scale, softcap,
            k_stride, k_head_stride, v_stride, v_head_stride, k_weight, cos, sin, eps, offset, k_scale, v_scale,
            KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, DECODE_ONLY, SOFTCAP, SINKS,
            HALF, NORM, WIDE, KV_FP8_MAX,
        )  # fmt: skip
    maximum, total, acc = _attend_cached_tokens(
        maximum, total, acc, query, blocks, table_row, k_cache, v_cache, head, first_visible, begin, end, scale, softcap, slopes,
        query_head, position, KV_HEADS, GROUP, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE,
        BLOCK_N, SOFTCAP, ALIBI, DOT,
    )  # fmt: skip
    if KV_FP8_MAX > 0:
        acc *= v_scale
    pdl_trigger(DEPENDENT)
    if LOAD_SIZE == 0 or used_splits == 1:
        _store_output(
            acc / total[:, None], query_head, group < GROUP, out, out_scale, static_scale, gate, gate_stride, gate_head_stride,
            token, num_tokens, q.dtype.element_ty, HEADS, VALUE_DIM, VALUE_PAD, QUANT, GATED,
        )  # fmt: skip
        return
    first = (row * KV_HEADS + head) * num_splits
    index = (first + split) * GROUP + group
    out_mask = (group < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(partial + index[:, None] * VALUE_DIM + value_dim[None, :], acc, mask=out_mask)
    tl.store(maxima + index, maximum, mask=group < GROUP)
    tl.store(sums + index, total, mask=group < GROUP)
    tl.debug_barrier()  # every thread writes its partial result before the counter grows
    arrived = tl.atomic_add(counters + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if arrived == used_splits - 1:
        tl.store(counters + row * KV_HEADS + head, 0)
        _combine_splits(
            head, out, out_scale, static_scale, gate, gate_stride, gate_head_stride, token, num_tokens, partial, maxima, sums,
            first, used_splits, q.dtype.element_ty, HEADS, GROUP, VALUE_DIM, VALUE_PAD, LOAD_SIZE, QUANT, GATED,
        )  # fmt: skip
