"""Triton: attention of rows with one new token over the paged cache, split over the context.

Grid `(KH, splits, R)`. The number of splits is fixed by the grid, so that a CUDA graph may hold the launch; how many are used
and which keys each takes is computed on the device from the row's real length. A program attends the query heads that share
a key head (packed into the rows of a matrix product) over its keys. The first split also takes the new token's key and value
straight from the inputs, and may write them into the cache. When a row uses several splits, each leaves its partial result in
a workspace, and the one that arrives last (an atomic counter per row and key head) combines them and resets the counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.attention.kv_cache_dtype import as_kept
from torchweave.ops.kernels.dependent_launch import enter, leave
from torchweave.ops.kernels.quant.fp8_quant import FP8_MAX, TINY
from torchweave.ops.kernels.rope import load_turned

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Start of a running maximum: finite, so that rows that have seen no key yet do not compute inf - inf."""


@triton.jit
def softcap_log2(scores, softcap):
    """`softcap * tanh(scores / softcap)` in units of log2(e); tanh by exp2, exact at both ends."""
    return softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))


@triton.jit
def lowest_key(position, window, chunk):
    """First key that a query at `position` sees; `window` and `chunk` 0 mean none."""
    lowest = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return tl.maximum(lowest, tl.where(chunk > 0, position // tl.maximum(chunk, 1) * chunk, 0))


@triton.jit
def load_blocks(table_row, tile, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks that hold the keys of the tile that begins at `tile`: one number if a tile lies within a block, else one a
    key. Loops load them one tile ahead: an address that waits for a load would halve the depth of the pipeline."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_row + tile // BLOCK_SIZE, mask=tile < end, other=0)
    else:  # noqa: RET505 (Triton compiles only the branch that is taken when there are two)
        keys = tile + tl.arange(0, BLOCK_N)
        return tl.load(table_row + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def cache_places(blocks, tile, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache slots (int64 `[BLOCK_N]`) of the keys of a tile, from what `load_blocks` gave."""
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
def _store(
    result, head, known, out, written, given, token, num_tokens, dtype: tl.constexpr,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Put the results `[N, VALUE_PAD]` of `head` `[N]` into a token's place. QUANT: 0 as they are; 1 in FP8 with the scale
    `given`; 2 with a scale for each head, which has 128 numbers. See `fp8_quant.store_fp8`."""
    dim = tl.arange(0, VALUE_PAD)
    mask = known[:, None] & (dim < VALUE_DIM)[None, :]
    if QUANT > 0:
        result = result.to(dtype).to(tl.float32)
        if QUANT == 1:
            scale = tl.zeros_like(result) + tl.load(given)
        else:
            size = tl.max(tl.where(mask, tl.abs(result), 0.0), 1)
            each = tl.div_rn(tl.maximum(size, TINY), FP8_MAX)
            tl.store(written + head.to(tl.int64) * num_tokens + token, each, mask=known)
            scale = tl.broadcast_to(each[:, None], result.shape)
        result = tl.clamp(tl.div_rn(result, scale), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    at = out + (token * HEADS + head)[:, None] * VALUE_DIM + dim[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine(
    head, out, written, given, token, num_tokens, partial, maxima, sums, first, used, dtype: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """Merge `used` partial results `[split, GROUP, VALUE_DIM]` that begin at split `first` into those of key head `head`."""
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, VALUE_PAD)
    mine = split < used
    for some in tl.range(0, GROUP, 4):
        for nth in tl.static_range(4 if GROUP > 4 else GROUP):  # unrolled, so that their loads are in flight together
            member = some + nth
            known = mine & (member < GROUP)
            index = (first + split) * GROUP + member
            maximum = tl.load(maxima + index, mask=known, other=LOWEST, cache_modifier=".cg")
            total = tl.load(sums + index, mask=known, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partial + index[:, None] * VALUE_DIM + dim[None, :],
                mask=known[:, None] & (dim < VALUE_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weight = tl.exp2(maximum - tl.max(maximum, 0))
            result = tl.sum(values * weight[:, None], 0) / tl.sum(total * weight, 0)
            one = head * GROUP + member + tl.zeros([1], tl.int32)
            _store(
                result[None, :], one, one < (head + 1) * GROUP, out, written, given, token, num_tokens, dtype,
                HEADS, VALUE_DIM, VALUE_PAD, QUANT,
            )  # fmt: skip


@triton.jit
def _new_token(
    query, token, head, k_new, v_new, k_cache, v_cache, slot_mapping, sinks, scale, softcap,
    k_stride, k_head_stride, v_stride, v_head_stride, k_weight, cos, sin, eps, offset, k_scale, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    STORE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The running softmax (maximum, total, sum of values) after the sinks and the new token; STORE: also cache the token.
    It is taken as later steps will read it from the cache."""
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    first = tl.zeros([1, 1], tl.int32)
    key_row = k_new + token * k_stride + head * k_head_stride + first
    key = load_turned(key_row, first == 0, k_weight, cos, sin, eps, offset, HEAD_DIM, HEAD_PAD, HALF, NORM, WIDE)
    key = tl.reshape(key, [HEAD_PAD])
    value = tl.load(v_new + token * v_stride + head * v_head_stride + value_dim, mask=value_dim < VALUE_DIM, other=0.0)
    key = as_kept(key, k_scale, k_cache.dtype.element_ty, LIMIT)
    value = as_kept(value, v_scale, v_cache.dtype.element_ty, LIMIT)
    if STORE:
        place = tl.load(slot_mapping + token)
        there = place >= 0
        place = place * KV_HEADS + head
        tl.store(k_cache + place * HEAD_DIM + dim, key, mask=(dim < HEAD_DIM) & there)
        tl.store(v_cache + place * VALUE_DIM + value_dim, value, mask=(value_dim < VALUE_DIM) & there)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    maximum = softcap_log2(score, softcap) if SOFTCAP else score * LOG2_E
    total = tl.full([GROUP_PAD], 1.0, tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32) + value.to(tl.float32)[None, :]
    if SINKS:
        sink = tl.load(sinks + head * GROUP + group, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(maximum, sink)
        total = tl.exp2(maximum - higher)
        acc *= total[:, None]
        total += tl.exp2(sink - higher)
        maximum = higher
    return maximum, total, acc


@triton.jit
def _cached_tokens(
    maximum, total, acc, query, table_row, k_cache, v_cache, head, lowest, begin, end, scale, softcap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Go on with a running softmax over the cached keys `[begin, end)` from `lowest` on; `begin` is a multiple of BLOCK_N."""
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    blocks = load_blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N)
    for tile in tl.range(begin, end, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        seen = (keys >= lowest) & (keys < end)
        places = cache_places(blocks, tile, BLOCK_SIZE, BLOCK_N)[:, None] * KV_HEADS + head
        blocks = load_blocks(table_row, tile + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k_mask = seen[:, None] if HEAD_PAD == HEAD_DIM else seen[:, None] & (dim < HEAD_DIM)[None, :]
        v_mask = seen[:, None] if VALUE_PAD == VALUE_DIM else seen[:, None] & (value_dim < VALUE_DIM)[None, :]
        k = tl.load(k_cache + places * HEAD_DIM + dim[None, :], mask=k_mask, other=0.0)
        v = tl.load(v_cache + places * VALUE_DIM + value_dim[None, :], mask=v_mask, other=0.0)
        scores = _scores(query, k.to(query.dtype), DOT) * scale
        scores = softcap_log2(scores, softcap) if SOFTCAP else scores * LOG2_E
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(maximum - higher)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None] + _weighted(weights, v.to(query.dtype), DOT)
        maximum = higher
    return maximum, total, acc


@triton.jit(
    do_not_specialize=["window", "chunk", "num_splits", "min_tiles", "num_tokens"],
    do_not_specialize_on_alignment=["query_start"],  # cut from a packed tensor: where it begins depends on the rows
)
def paged_decode(
    q, k_new, v_new, out, k_cache, v_cache,
    slots, query_start, seq_lens, block_table, slot_mapping, sinks,
    partial, maxima, sums, counters, q_weight, k_weight, cos, sin, written, given,
    scale, softcap, window, chunk, num_splits, min_tiles, eps, offset, k_scale, v_scale, num_tokens,
    table_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS_PAD: tl.constexpr,
    DECODE_ONLY: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DOT: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr, QUANT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one split. DECODE_ONLY: row i is token i, padding rows are zeroed and K/V are written here;
    otherwise rows that do not have exactly one token are left to the prefill kernel, and K/V are in the cache already.
    HALF: half of the numbers of a head that rotary embedding turns here, after the norm if NORM; 0: it has been done.
    SPLITS_PAD: a power of two, at least `num_splits`; 1 leaves the combining out. DEPENDENT: see `dependent.py`.
    QUANT: see `_store`. LIMIT: see `as_kept`; `scale` is then that of scores with keys as they are kept."""
    enter(DEPENDENT)
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    token = row.to(tl.int64)
    if not DECODE_ONLY:
        start = tl.load(query_start + row)
        if tl.load(query_start + row + 1) - start != 1:
            return
        token = start.to(tl.int64)
    group = tl.arange(0, GROUP_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    query_head = head * GROUP + group
    if slot < 0:
        if split == 0:
            _store(
                tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32), query_head, group < GROUP, out, written, given, token, num_tokens,
                q.dtype.element_ty, HEADS, VALUE_DIM, VALUE_PAD, QUANT,
            )  # fmt: skip
        return

    position = length - 1  # of the new token; the cache holds the keys before it
    lowest = lowest_key(position, window, chunk)
    base = lowest // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(position - base, BLOCK_N)
    # Combining costs as much as a few tiles: a short context is not split.
    tiles_per_split = tl.where(tiles <= min_tiles, tl.maximum(tiles, 1), tl.cdiv(tiles, num_splits))
    used = tl.maximum(tl.cdiv(tiles, tiles_per_split), 1)
    if split >= used:
        return
    begin = base + split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, position)

    cos, sin = cos + token * (2 * HALF), sin + token * (2 * HALF)
    query_rows = q + token * q_stride + (head * GROUP + group)[:, None] * q_head_stride
    query = load_turned(
        query_rows, (group < GROUP)[:, None], q_weight, cos, sin, eps, offset, HEAD_DIM, HEAD_PAD, HALF, NORM, WIDE
    )
    maximum = tl.full([GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    if split == 0:
        maximum, total, acc = _new_token(
            query, token, head, k_new, v_new, k_cache, v_cache, slot_mapping, sinks, scale, softcap,
            k_stride, k_head_stride, v_stride, v_head_stride, k_weight, cos, sin, eps, offset, k_scale, v_scale,
            KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, DECODE_ONLY, SOFTCAP, SINKS,
            HALF, NORM, WIDE, LIMIT,
        )  # fmt: skip
    maximum, total, acc = _cached_tokens(
        maximum, total, acc, query, block_table + slot * table_stride, k_cache, v_cache, head, lowest, begin, end,
        scale, softcap, KV_HEADS, HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, BLOCK_N, SOFTCAP, DOT,
    )  # fmt: skip
    if LIMIT > 0:
        acc *= v_scale
    leave(DEPENDENT)
    if SPLITS_PAD == 1 or used == 1:
        _store(
            acc / total[:, None], query_head, group < GROUP, out, written, given, token, num_tokens,
            q.dtype.element_ty, HEADS, VALUE_DIM, VALUE_PAD, QUANT,
        )  # fmt: skip
        return
    first = (row * KV_HEADS + head) * num_splits
    index = (first + split) * GROUP + group
    out_mask = (group < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(partial + index[:, None] * VALUE_DIM + value_dim[None, :], acc, mask=out_mask)
    tl.store(maxima + index, maximum, mask=group < GROUP)
    tl.store(sums + index, total, mask=group < GROUP)
    tl.debug_barrier()  # every thread's partial result is written before the counter says so
    arrived = tl.atomic_add(counters + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if arrived == used - 1:
        tl.store(counters + row * KV_HEADS + head, 0)
        _combine(
            head, out, written, given, token, num_tokens, partial, maxima, sums, first, used, q.dtype.element_ty,
            HEADS, GROUP, VALUE_DIM, VALUE_PAD, SPLITS_PAD, QUANT,
        )  # fmt: skip
