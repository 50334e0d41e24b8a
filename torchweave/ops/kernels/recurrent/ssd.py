"""Triton: scan of Mamba2 (state space duality) over the rows of a step.

Rows with one token: one step of the recurrence, the state read and written once. Rows with several tokens: their chunks in
parallel, as in the Mamba2 paper (Dao and Gu, 2024, section 6). `ssd_chunk_states` computes what each chunk adds to the state,
`ssd_pass_states` the state before each chunk, and `ssd_chunk_scan` the results, by attention with decays inside a chunk. Rows of
at most one chunk need the last kernel only. Rows with drafts, which are short: steps of the recurrence one after the other, with
the state in registers.
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
    WHOLE,
    count_chunks,
    decay_rate,
    find_chunk,
    in_this_iteration,
    numbered_chunk,
    row_end,
    row_tokens,
    silu,
    softplus,
)


@triton.jit
def _step_bias(dt_bias, head, BIAS: tl.constexpr):
    """What is added to the time steps of a head, in float32."""
    if BIAS:
        return tl.load(dt_bias + head).to(tl.float32)
    return 0.0


@triton.jit
def _time_step(dt, bias, limit_min, limit_max, SOFTPLUS: tl.constexpr):
    dt = dt.to(tl.float32) + bias
    if SOFTPLUS:
        dt = softplus(dt)
    return tl.minimum(tl.maximum(dt, limit_min), limit_max)


@triton.jit
def _gated(result, gate):
    """`result * silu(gate)`, rounded as the separate operations round."""
    active = silu(gate.to(tl.float32)).to(gate.dtype)
    return (result.to(tl.float32) * active.to(tl.float32)).to(result.dtype)


@triton.jit
def _token_inputs(
    x, dt, B, C, bias, token, head, dim, column, valid_dim, valid_column, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    GROUP: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """x, B, C and the time step of a token and head, in float32; `bias` is that of the head's step.

    B and C are one load: each is followed by an exchange between threads, which later loads would wait for.
    """
    step = tl.load(dt + token * dt_stride + head * dt_head_stride)
    group = head // GROUP
    is_key = (tl.arange(0, 2) == 0)[:, None]
    row = tl.where(is_key, B + token * b_stride + group * b_group_stride, C + token * c_stride + group * c_group_stride)
    both = tl.load(row + column[None, :], mask=valid_column[None, :], other=0.0).to(tl.float32)
    values = tl.load(x + token * x_stride + head * x_head_stride + dim, mask=valid_dim, other=0.0).to(tl.float32)
    keys, query = tl.sum(tl.where(is_key, both, 0.0), 0), tl.sum(tl.where(is_key, 0.0, both), 0)
    return values, keys, query, _time_step(step, bias, dt_min, dt_max, SOFTPLUS)


@triton.jit(do_not_specialize_on_alignment=["query_start"])
def ssd_decode(
    x, dt, A, B, C, D, z, dt_bias, out, state, slots, query_start, seq_lens, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    z_stride, z_head_stride, out_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, STATE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_RATE: tl.constexpr,
    GATE: tl.constexpr, DECODE_ONLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of head `program_id(1)` of row `program_id(2)`. DECODE_ONLY: row i is token i, and padding rows are zeroed;
    otherwise rows without exactly one token are skipped.

    DECODE_ONLY: the previous kernel writes inputs, but neither the rows of the step nor states: both are loaded before the wait,
    bypassing L1.
    """
    if not DECODE_ONLY:
        pdl_wait(DEPENDENT)
    head, row = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    token = row.to(tl.int64)
    if not DECODE_ONLY:
        start = tl.load(query_start + row)
        if tl.load(query_start + row + 1) - start != 1:
            return
        token = start.to(tl.int64)
    dim, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE_PAD)
    valid_dim, valid_column = dim < HEAD_DIM, column < STATE
    target = out + token * out_stride + head * out_head_stride + dim
    if slot < 0:
        if DECODE_ONLY:
            pdl_wait(DEPENDENT)
        tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=valid_dim)
        return
    place = state + ((slot * HEADS + head) * HEAD_DIM + dim[:, None]) * STATE + column[None, :]
    valid = valid_dim[:, None] & valid_column[None, :]
    continued = tl.load(seq_lens + row, cache_modifier=".cg") > 1
    matrix = tl.load(place, mask=valid & continued, other=0.0, cache_modifier=".cg")
    if DECODE_ONLY:
        if (tl.program_id(0) == 0) & (row == 0):
            pdl_prefetch(A + head, DEPENDENT)
            if BIAS:
                pdl_prefetch(dt_bias + head, DEPENDENT)
            if SKIP:
                pdl_prefetch(D + head, DEPENDENT)
        pdl_wait(DEPENDENT)
    rate, bias = decay_rate(A + head, True, LOG_RATE), _step_bias(dt_bias, head, BIAS)
    skip = tl.load(D + head).to(tl.float32) if SKIP else 0.0
    if GATE:
        gate = tl.load(z + token * z_stride + head * z_head_stride + dim, mask=valid_dim, other=0.0)
    values, keys, query, step = _token_inputs(
        x, dt, B, C, bias, token, head, dim, column, valid_dim, valid_column, dt_min, dt_max,
        x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
        GROUP, SOFTPLUS,
    )  # fmt: skip
    matrix = matrix * tl.exp(step * rate) + (step * values)[:, None] * keys[None, :]
    tl.store(place, matrix, mask=valid)
    result = tl.sum(matrix * query[None, :], 1)
    if SKIP:
        result += skip * values
    result = result.to(out.dtype.element_ty)
    if GATE:
        result = _gated(result, gate)
    tl.store(target, result, mask=valid_dim)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def ssd_drafts(
    x, dt, A, B, C, D, z, dt_bias, out, state, slots, query_start, seq_lens, position, num_rows, num_tokens, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    z_stride, z_head_stride, out_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, STATE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_RATE: tl.constexpr,
    GATE: tl.constexpr, ACCESS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of head `program_id(1)` of row `program_id(2)`, token after token; padded tokens become zero."""
    pdl_wait(DEPENDENT)
    head, row = tl.program_id(1), tl.program_id(2)
    first, end = row_tokens(query_start, row, num_rows, num_tokens, False)
    if first >= end:
        return
    dim, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE_PAD)
    valid_dim, valid_column = dim < HEAD_DIM, column < STATE
    token = first.to(tl.int64)
    target = out + head * out_head_stride + dim
    if row == num_rows:
        for _ in range(first, end):
            tl.store(target + token * out_stride, tl.zeros([BLOCK], out.dtype.element_ty), mask=valid_dim)
            token += 1
        return
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HEADS + head) * HEAD_DIM + dim[:, None]) * STATE + column[None, :]
    valid = valid_dim[:, None] & valid_column[None, :]
    length = tl.load(seq_lens + row)
    matrix = tl.load(place, mask=valid & (length > end - first), other=0.0)
    end = row_end(end, length, position, slot, ACCESS)
    rate, bias = decay_rate(A + head, True, LOG_RATE), _step_bias(dt_bias, head, BIAS)
    for _ in range(first, end):
        values, keys, query, step = _token_inputs(
            x, dt, B, C, bias, token, head, dim, column, valid_dim, valid_column, dt_min, dt_max,
            x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
            GROUP, SOFTPLUS,
        )  # fmt: skip
        matrix = matrix * tl.exp(step * rate) + (step * values)[:, None] * keys[None, :]
        if ACCESS != COMMIT:
            result = tl.sum(matrix * query[None, :], 1)
            if SKIP:
                result += tl.load(D + head).to(tl.float32) * values
            result = result.to(out.dtype.element_ty)
            if GATE:
                result = _gated(
                    result, tl.load(z + token * z_stride + head * z_head_stride + dim, mask=valid_dim, other=0.0)
                )
            tl.store(target + token * out_stride, result, mask=valid_dim)
        token += 1
    if ACCESS != READ:
        tl.store(place, matrix, mask=valid)


@triton.jit
def _chunk_steps(
    dt, dt_bias, A, begin, end, head, dt_min, dt_max, dt_stride, dt_head_stride,
    CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_RATE: tl.constexpr,
):  # fmt: skip
    """Tokens of a chunk, whether each is in the row, their time steps, and the logarithm of the decay from the chunk's beginning
    through each token and through all."""
    token = begin.to(tl.int64) + tl.arange(0, CHUNK)
    valid = token < end
    step = tl.load(dt + token * dt_stride + head * dt_head_stride, mask=valid, other=0.0)
    step = tl.where(valid, _time_step(step, _step_bias(dt_bias, head, BIAS), dt_min, dt_max, SOFTPLUS), 0.0)
    decay = step * decay_rate(A + head, True, LOG_RATE)
    return token, valid, step, tl.cumsum(decay, 0), tl.sum(decay, 0)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def ssd_chunk_states(
    x, dt, A, B, dt_bias, added, decay, query_start, num_rows, num_tokens, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_RATE: tl.constexpr,
    PRECISION: tl.constexpr, SHARED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to BLOCK channels of the state of head `program_id(1)`, and its decay, at the place
    `first token // CHUNK` of `added` `[T // CHUNK + 1, HEADS, HEAD_DIM, STATE]` and `decay`; for chunks that another one of
    their row follows. SHARED: programs of the third dimension share the chunks."""
    pdl_wait(DEPENDENT)
    if SHARED:
        count = count_chunks(query_start, num_rows, num_tokens, CHUNK, CHUNK, False)
        for number in range(tl.program_id(2), count, tl.num_programs(2)):
            _, _, end, begin = numbered_chunk(query_start, number, num_rows, num_tokens, CHUNK, CHUNK, False)
            if begin + CHUNK < end:
                block = in_this_iteration(tl.program_id(0), DEPENDENT)
                head = in_this_iteration(tl.program_id(1), DEPENDENT)
                _add_chunk_state(
                    x, dt, A, B, dt_bias, added, decay, block, head, begin, end, dt_min, dt_max,
                    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride,
                    HEADS, GROUP, HEAD_DIM, STATE, BLOCK, TILE, CHUNK, BIAS, SOFTPLUS, LOG_RATE, PRECISION,
                )  # fmt: skip
    else:
        row, _, end, begin = find_chunk(query_start, tl.program_id(2), num_rows, num_tokens, CHUNK)
        if (row < num_rows) & (begin + CHUNK < end):
            _add_chunk_state(
                x, dt, A, B, dt_bias, added, decay, tl.program_id(0), tl.program_id(1), begin, end, dt_min, dt_max,
                x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride,
                HEADS, GROUP, HEAD_DIM, STATE, BLOCK, TILE, CHUNK, BIAS, SOFTPLUS, LOG_RATE, PRECISION,
            )  # fmt: skip


@triton.jit
def _add_chunk_state(
    x, dt, A, B, dt_bias, added, decay, block, head, begin, end, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LOG_RATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to channels of block `block` of a head's state, and its decay."""
    token, _, step, total, whole = _chunk_steps(
        dt, dt_bias, A, begin, end, head, dt_min, dt_max, dt_stride, dt_head_stride, CHUNK, BIAS, SOFTPLUS, LOG_RATE
    )
    dim = block * BLOCK + tl.arange(0, BLOCK)
    valid_dim = dim < HEAD_DIM
    values = tl.load(
        x + token[None, :] * x_stride + head * x_head_stride + dim[:, None], mask=valid_dim[:, None], other=0.0
    )
    dtype = x.dtype.element_ty
    values = (values.to(tl.float32) * (step * tl.exp(whole - total))[None, :]).to(dtype)
    place = ((begin // CHUNK).to(tl.int64) * HEADS + head) * HEAD_DIM
    if block == 0:
        tl.store(decay + (begin // CHUNK) * HEADS + head, tl.exp(whole))
    for first in tl.static_range(0, STATE, TILE):
        column = first + tl.arange(0, TILE)
        valid_column = column < STATE
        keys = tl.load(
            B + token[:, None] * b_stride + (head // GROUP) * b_group_stride + column[None, :],
            mask=valid_column[None, :], other=0.0,
        )  # fmt: skip
        tl.store(
            added + (place + dim[:, None]) * STATE + column[None, :],
            tl.dot(values, keys.to(dtype), input_precision=PRECISION),
            mask=valid_dim[:, None] & valid_column[None, :],
        )


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def ssd_pass_states(
    added, decay, before, state, slots, query_start, seq_lens, num_rows, num_tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the state of head `program_id(1)` of a row, the `program_id(2)`-th of more than one chunk: the state before
    each chunk but the last goes to `before`, that before the last chunk to `state`."""
    pdl_wait(DEPENDENT)
    head = tl.program_id(1)
    row, first, end, _ = numbered_chunk(query_start, tl.program_id(2), num_rows, num_tokens, WHOLE, CHUNK, False)
    if row < 0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < SIZE
    place = state + (tl.load(slots + row).to(tl.int64) * HEADS + head) * SIZE + at
    current = tl.load(place, mask=valid & (tl.load(seq_lens + row) > end - first), other=0.0)
    chunk = (first // CHUNK).to(tl.int64) * HEADS + head
    for _ in tl.range(first, end - CHUNK, CHUNK, num_stages=3):
        tl.store(before + chunk * SIZE + at, current.to(before.dtype.element_ty), mask=valid)
        current = current * tl.load(decay + chunk) + tl.load(added + chunk * SIZE + at, mask=valid, other=0.0)
        chunk += HEADS
    tl.store(place, current, mask=valid)


@triton.jit
def _by_queries(
    query_row, key_row, state_row, valid_token, valid_dim, dim, dtype: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of a chunk's queries with its keys `[CHUNK, CHUNK]` and with BLOCK channels of a state `[CHUNK, BLOCK]`."""
    scores, result = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, BLOCK], tl.float32)
    for first in tl.range(0, STATE, TILE):
        column = first + tl.arange(0, TILE)
        valid_column = column < STATE
        by_column = valid_token[:, None] & valid_column[None, :]
        query = tl.load(query_row + column[None, :], mask=by_column, other=0.0).to(dtype)
        keys = tl.load(key_row + column[None, :], mask=by_column, other=0.0).to(dtype)
        matrix = tl.load(
            state_row + dim[None, :] * STATE + column[:, None],
            mask=valid_dim[None, :] & valid_column[:, None],
            other=0.0,
        ).to(dtype)
        scores = tl.dot(query, tl.trans(keys), scores, input_precision=PRECISION)
        result = tl.dot(query, matrix, result, input_precision=PRECISION)
    return scores, result


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def ssd_chunk_scan(
    x, dt, A, B, C, D, z, dt_bias, out, state, before, slots, query_start, seq_lens, num_rows, num_tokens, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    z_stride, z_head_stride, out_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    LOG_RATE: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Results of BLOCK channels of head `program_id(1)` in the chunks of rows with several tokens, which with SHARED programs of
    the third dimension share. The last chunk of a row advances the state. Padded tokens become zero."""
    pdl_wait(DEPENDENT)
    if SHARED:
        count = count_chunks(query_start, num_rows, num_tokens, CHUNK, 1, True)
        for number in range(tl.program_id(2), count, tl.num_programs(2)):
            row, row_begin, end, begin = numbered_chunk(query_start, number, num_rows, num_tokens, CHUNK, 1, True)
            _scan_chunk(
                x, dt, A, B, C, D, z, dt_bias, out, state, before, slots, seq_lens,
                in_this_iteration(tl.program_id(0), DEPENDENT), in_this_iteration(tl.program_id(1), DEPENDENT),
                row, row_begin, end, begin, num_rows, num_tokens, dt_min, dt_max,
                x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
                z_stride, z_head_stride, out_stride, out_head_stride,
                HEADS, GROUP, HEAD_DIM, STATE, BLOCK, TILE, CHUNK, SKIP, BIAS, SOFTPLUS, LOG_RATE, GATE, PRECISION,
            )  # fmt: skip
    else:
        row, row_begin, end, begin = find_chunk(query_start, tl.program_id(2), num_rows, num_tokens, CHUNK)
        if (begin < end) & ((row == num_rows) | (end - row_begin > 1)):
            _scan_chunk(
                x, dt, A, B, C, D, z, dt_bias, out, state, before, slots, seq_lens, tl.program_id(0), tl.program_id(1),
                row, row_begin, end, begin, num_rows, num_tokens, dt_min, dt_max,
                x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
                z_stride, z_head_stride, out_stride, out_head_stride,
                HEADS, GROUP, HEAD_DIM, STATE, BLOCK, TILE, CHUNK, SKIP, BIAS, SOFTPLUS, LOG_RATE, GATE, PRECISION,
            )  # fmt: skip


@triton.jit
def _scan_chunk(
    x, dt, A, B, C, D, z, dt_bias, out, state, before, slots, seq_lens, block, head, row, row_begin, end, begin, num_rows,
    num_tokens, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    z_stride, z_head_stride, out_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    LOG_RATE: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Results of a chunk, or zeros of padded tokens."""
    if row == num_rows:
        dim = block * BLOCK + tl.arange(0, BLOCK)
        token = (begin + tl.arange(0, CHUNK)).to(tl.int64)[:, None]
        target = out + head * out_head_stride + token * out_stride + dim[None, :]
        valid = (token < num_tokens) & (dim < HEAD_DIM)[None, :]
        tl.store(target, tl.zeros([CHUNK, BLOCK], out.dtype.element_ty), mask=valid)
    else:
        _scan_row_chunk(
            x, dt, A, B, C, D, z, dt_bias, out, state, before, slots, seq_lens, block, head, row, row_begin, end, begin, dt_min,
            dt_max,
            x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
            z_stride, z_head_stride, out_stride, out_head_stride,
            HEADS, GROUP, HEAD_DIM, STATE, BLOCK, TILE, CHUNK, SKIP, BIAS, SOFTPLUS, LOG_RATE, GATE, PRECISION,
        )  # fmt: skip


@triton.jit
def _scan_row_chunk(
    x, dt, A, B, C, D, z, dt_bias, out, state, before, slots, seq_lens, block, head, row, row_begin, end, begin, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    z_stride, z_head_stride, out_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    LOG_RATE: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Results of channels of block `block` of a head in one chunk, and the state after the last chunk of a row."""
    at = tl.arange(0, CHUNK)
    dim = block * BLOCK + tl.arange(0, BLOCK)
    valid_dim = dim < HEAD_DIM
    target = out + head * out_head_stride + dim[None, :]
    dtype = x.dtype.element_ty
    token, valid_token, step, total, whole = _chunk_steps(
        dt, dt_bias, A, begin, end, head, dt_min, dt_max, dt_stride, dt_head_stride, CHUNK, BIAS, SOFTPLUS, LOG_RATE
    )
    is_last = begin + CHUNK >= end
    slot = tl.load(slots + row).to(tl.int64)
    state_row = state + (slot * HEADS + head) * HEAD_DIM * STATE
    before_row = before + ((begin // CHUNK).to(tl.int64) * HEADS + head) * HEAD_DIM * STATE
    continued = (begin > row_begin) | (tl.load(seq_lens + row) > end - row_begin)
    key_row = B + token[:, None] * b_stride + (head // GROUP) * b_group_stride
    query_row = C + token[:, None] * c_stride + (head // GROUP) * c_group_stride
    if is_last:  # two loops, since Triton pipelines no loads inside a branch of a loop
        valid = valid_dim & continued
        scores, result = _by_queries(
            query_row, key_row, state_row, valid_token, valid, dim, dtype, CHUNK, BLOCK, STATE, TILE, PRECISION
        )
    else:
        scores, result = _by_queries(
            query_row, key_row, before_row, valid_token, valid_dim, dim, dtype, CHUNK, BLOCK, STATE, TILE, PRECISION
        )
    values = tl.load(
        x + token[:, None] * x_stride + head * x_head_stride + dim[None, :],
        mask=valid_token[:, None] & valid_dim[None, :], other=0.0,
    )  # fmt: skip
    between = tl.exp(tl.where(at[:, None] >= at[None, :], total[:, None] - total[None, :], float("-inf")))
    result *= tl.exp(total)[:, None]
    result = tl.dot((scores * between * step[None, :]).to(dtype), values, result, input_precision=PRECISION)
    if SKIP:
        result += tl.load(D + head).to(tl.float32) * values.to(tl.float32)
    result = result.to(out.dtype.element_ty)
    by_dim = valid_token[:, None] & valid_dim[None, :]
    if GATE:
        gate = z + token[:, None] * z_stride + head * z_head_stride + dim[None, :]
        result = _gated(result, tl.load(gate, mask=by_dim, other=0.0))
    tl.store(target + token[:, None] * out_stride, result, mask=by_dim)
    if is_last:
        added = tl.trans((values.to(tl.float32) * (step * tl.exp(whole - total))[:, None]).to(dtype))
        for first in tl.range(0, STATE, TILE):
            column = first + tl.arange(0, TILE)
            keys = tl.load(
                key_row + column[None, :], mask=valid_token[:, None] & (column < STATE)[None, :], other=0.0
            ).to(dtype)
            place = state_row + dim[:, None] * STATE + column[None, :]
            valid_state = valid_dim[:, None] & (column < STATE)[None, :]
            matrix = tl.load(place, mask=valid_state & continued, other=0.0) * tl.exp(whole)
            tl.store(place, tl.dot(added, keys, matrix, input_precision=PRECISION), mask=valid_state)
