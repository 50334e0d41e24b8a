"""Triton: the scans of Mamba and of the RG-LRU over the rows of a step.

One program walks all tokens of its row for a block of channels, TILE tokens at once by an associative scan. TILE is 1 where each
row has one token.
"""

# Triton's decorators are untyped.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_prefetch, pdl_wait
from torchweave.ops.kernels.recurrent.chunks import (
    COMMIT,
    READ,
    decay_rate,
    is_padding,
    row_end,
    row_tokens,
    silu,
    softplus,
)


@triton.jit
def _combine(decay, added, next_decay, next_added):
    return decay * next_decay, next_decay * added + next_added


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def selective_scan(
    x, dt, A, B, C, D, z, dt_bias, out, state, slots, query_start, seq_lens, position, num_rows, num_tokens, channels,
    x_stride, dt_stride, b_stride, c_stride, z_stride, out_stride,
    STATE: tl.constexpr, STATE_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SKIP: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, LOG_RATE: tl.constexpr, DECODE_ONLY: tl.constexpr, ACCESS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of row `program_id(1)`, token after token; padded tokens become zero.

    DECODE_ONLY: the previous kernel writes inputs, but neither the rows of the step nor states: both are loaded before the wait,
    bypassing L1.
    """
    if not DECODE_ONLY:
        pdl_wait(DEPENDENT)
    row = tl.program_id(1)
    first, end = row_tokens(query_start, row, num_rows, num_tokens, DECODE_ONLY)
    if first >= end:
        return
    channel, column, at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE_PAD), tl.arange(0, TILE)
    valid_channel, valid_column = channel < channels, column < STATE
    if is_padding(slots, row, num_rows, DECODE_ONLY):
        if DECODE_ONLY:
            pdl_wait(DEPENDENT)
        for begin in range(first, end, TILE):
            token = (begin + at).to(tl.int64)[:, None]
            valid = (token < end) & valid_channel[None, :]
            target = out + token * out_stride + channel[None, :]
            tl.store(target, tl.zeros([TILE, BLOCK], out.dtype.element_ty), mask=valid)
        return
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    element = channel[:, None] * STATE + column[None, :]
    valid_state = valid_channel[:, None] & valid_column[None, :]
    place = state + slot * channels * STATE + element
    length = tl.load(seq_lens + row, cache_modifier=".cg")
    matrix = tl.load(place, mask=valid_state & (length > end - first), other=0.0, cache_modifier=".cg")
    end = row_end(end, length, position, slot, ACCESS)
    if DECODE_ONLY:
        if row == 0:
            pdl_prefetch(tl.where(valid_channel, A + channel * STATE, A), DEPENDENT)
        pdl_wait(DEPENDENT)
    rate = decay_rate(A + element, valid_state, LOG_RATE)
    for begin in tl.range(first, end, TILE):
        token = (begin + at).to(tl.int64)
        valid_token = token < end
        valid = valid_token[:, None] & valid_channel[None, :]
        by_column = valid_token[:, None] & valid_column[None, :]
        values = tl.load(x + token[:, None] * x_stride + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        step = tl.load(dt + token[:, None] * dt_stride + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        keys = tl.load(B + token[:, None] * b_stride + column[None, :], mask=by_column, other=0.0).to(tl.float32)
        query = tl.load(C + token[:, None] * c_stride + column[None, :], mask=by_column, other=0.0).to(tl.float32)
        if BIAS:
            step += tl.load(dt_bias + channel, mask=valid_channel, other=0.0).to(tl.float32)[None, :]
        step = tl.where(valid, softplus(step), 0.0)  # a step of 0 keeps the state
        decay = tl.exp(step[:, :, None] * rate[None, :, :])
        added = (step * values)[:, :, None] * keys[:, None, :]
        if TILE == 1:
            states = decay * matrix[None, :, :] + added
            matrix = tl.reshape(states, [BLOCK, STATE_PAD])
        else:
            decay, added = tl.associative_scan((decay, added), 0, _combine)
            states = decay * matrix[None, :, :] + added
            matrix = tl.sum(tl.where((at == TILE - 1)[:, None, None], states, 0.0), 0)
        if ACCESS != COMMIT:
            result = tl.sum(states * query[:, None, :], 2)
            if SKIP:
                result += tl.load(D + channel, mask=valid_channel, other=0.0).to(tl.float32)[None, :] * values
            if GATE:
                gate = tl.load(z + token[:, None] * z_stride + channel[None, :], mask=valid, other=0.0)
                result *= silu(gate.to(tl.float32))
            target = out + token[:, None] * out_stride + channel[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=valid)
    if ACCESS != READ:
        tl.store(place, matrix, mask=valid_state)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def lru_scan(
    a, x, out, state, slots, query_start, seq_lens, position, num_rows, num_tokens, channels,
    a_stride, x_stride, out_stride,
    BLOCK: tl.constexpr, TILE: tl.constexpr, DECODE_ONLY: tl.constexpr, ACCESS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of row `program_id(1)`, token after token; padded tokens become zero. Loads before the wait as
    `selective_scan` does."""
    if not DECODE_ONLY:
        pdl_wait(DEPENDENT)
    row = tl.program_id(1)
    first, end = row_tokens(query_start, row, num_rows, num_tokens, DECODE_ONLY)
    if first >= end:
        return
    channel, at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TILE)
    valid_channel = channel < channels
    padding = is_padding(slots, row, num_rows, DECODE_ONLY)
    slot, continued = tl.zeros([], tl.int64), False
    if not padding:
        slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
        length = tl.load(seq_lens + row, cache_modifier=".cg")
        continued = length > end - first
        end = row_end(end, length, position, slot, ACCESS)
    place = state + slot * channels + channel
    before = tl.load(place, mask=valid_channel & continued, other=0.0, cache_modifier=".cg")
    if DECODE_ONLY:
        pdl_wait(DEPENDENT)
    for begin in tl.range(first, end, TILE):
        token = (begin + at).to(tl.int64)[:, None]
        # Of padded tokens nothing is read: the recurrence of zeros is zero.
        valid = (token < end) & valid_channel[None, :]
        decay = tl.load(a + token * a_stride + channel[None, :], mask=valid & (not padding), other=1.0).to(tl.float32)
        added = tl.load(x + token * x_stride + channel[None, :], mask=valid & (not padding), other=0.0).to(tl.float32)
        if TILE > 1:
            decay, added = tl.associative_scan((decay, added), 0, _combine)
        states = decay * before[None, :] + added
        before = tl.sum(tl.where((at == TILE - 1)[:, None], states, 0.0), 0)
        if ACCESS != COMMIT:
            tl.store(out + token * out_stride + channel[None, :], states.to(out.dtype.element_ty), mask=valid)
    if ACCESS != READ:
        tl.store(place, before, mask=valid_channel & (not padding))
