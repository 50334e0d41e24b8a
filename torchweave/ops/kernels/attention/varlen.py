"""Triton: flash attention of sequences to themselves in both directions, for head sizes that are no power of two.

A head is two parts, each a power of two wide: its first PART channels, and its last TAIL, which may overlap the first. 72 = 64 + 16
takes 80 columns of products; padded to a power of two it would take 128. The query is zero where the tail overlaps, so no load of
keys or values needs a mask of channels. The device finds a program's sequence, as in `paged_prefill`.
"""

# MASKED is known when a kernel is compiled.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.attention.paged_decode import LOWEST
from torchweave.ops.kernels.find_row import find_row


@triton.jit
def _attend_tile(
    acc, acc_tail, maximum, total, query, query_tail, k_at, k_tail_at, v_at, v_tail_at, keys_left, scale_log2,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend one tile of keys; MASKED: only its first `keys_left`, which are less than BLOCK_N."""
    if MASKED:
        in_range = tl.arange(0, BLOCK_N) < keys_left
        k = tl.load(k_at, mask=in_range[None, :], other=0.0)
        k_tail = tl.load(k_tail_at, mask=in_range[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        k_tail = tl.load(k_tail_at)
    scores = tl.dot(query_tail, k_tail, tl.dot(query, k))
    if MASKED:
        scores = tl.where(in_range[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_maximum[:, None])
    rescale = tl.exp2(maximum - new_maximum)
    total = total * rescale + tl.sum(weights, 1)
    if MASKED:
        v = tl.load(v_at, mask=in_range[:, None], other=0.0)
        v_tail = tl.load(v_tail_at, mask=in_range[:, None], other=0.0)
    else:
        v = tl.load(v_at)
        v_tail = tl.load(v_tail_at)
    weights = weights.to(v.dtype)
    acc = tl.dot(weights, v, acc * rescale[:, None])
    acc_tail = tl.dot(weights, v_tail, acc_tail * rescale[:, None])
    return acc, acc_tail, new_maximum, total


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["cu_seqlens"])
def varlen_attention_kernel(
    q, k, v, out, cu_seqlens, num_sequences, scale_log2,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    HEAD_DIM: tl.constexpr, PART: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of one sequence, for the head `program_id(1)`; strides are multiples of 8.

    scale_log2: the positive factor of the scores, times log2(e).
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = find_row(cu_seqlens, tile, num_sequences, BLOCK_M)
    if row == num_sequences:
        return
    start = tl.load(cu_seqlens + row).to(tl.int64)
    count = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
    first = (tile - (start // BLOCK_M + row)).to(tl.int32) * BLOCK_M
    if first >= count:
        return

    offset = first + tl.arange(0, BLOCK_M)
    valid = offset < count
    keys = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, PART)
    tail_dim = tl.arange(0, TAIL) + (HEAD_DIM - TAIL)
    q += tl.multiple_of(start * q_stride + head * q_head_stride, 8)
    k += tl.multiple_of(start * k_stride + head * k_head_stride, 8)
    v += tl.multiple_of(start * v_stride + head * v_head_stride, 8)
    q_rows = offset[:, None] * tl.multiple_of(q_stride, 8)
    k_rows = keys[None, :] * tl.multiple_of(k_stride, 8)
    v_rows = keys[:, None] * tl.multiple_of(v_stride, 8)
    query = tl.load(q + q_rows + dim[None, :], mask=valid[:, None], other=0.0)
    query_tail = tl.load(q + q_rows + tail_dim[None, :], mask=valid[:, None] & (tail_dim >= PART)[None, :], other=0.0)
    k_at, k_tail_at = k + k_rows + dim[:, None], k + k_rows + tail_dim[:, None]
    v_at, v_tail_at = v + v_rows + dim[None, :], v + v_rows + tail_dim[None, :]

    maximum = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PART], tl.float32)
    acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
    whole = count // BLOCK_N * BLOCK_N
    for _ in tl.range(0, whole, BLOCK_N):
        acc, acc_tail, maximum, total = _attend_tile(
            acc, acc_tail, maximum, total, query, query_tail, k_at, k_tail_at, v_at, v_tail_at, BLOCK_N, scale_log2,
            BLOCK_N, False,
        )  # fmt: skip
        k_at += BLOCK_N * tl.multiple_of(k_stride, 8)
        k_tail_at += BLOCK_N * tl.multiple_of(k_stride, 8)
        v_at += BLOCK_N * tl.multiple_of(v_stride, 8)
        v_tail_at += BLOCK_N * tl.multiple_of(v_stride, 8)
    if whole < count:
        acc, acc_tail, maximum, total = _attend_tile(
            acc, acc_tail, maximum, total, query, query_tail, k_at, k_tail_at, v_at, v_tail_at, count - whole, scale_log2,
            BLOCK_N, True,
        )  # fmt: skip

    out += ((start + offset) * tl.num_programs(1) + head)[:, None] * HEAD_DIM
    inverse = 1.0 / total[:, None]
    tl.store(out + dim[None, :], (acc * inverse).to(out.dtype.element_ty), mask=valid[:, None])
    tail_mask = valid[:, None] & (tail_dim >= PART)[None, :]
    tl.store(out + tail_dim[None, :], (acc_tail * inverse).to(out.dtype.element_ty), mask=tail_mask)
