"""Triton: gated delta rule over the rows of a step.

Rows with few tokens, and all rows where the decay has a value for each key channel: a program walks its row's tokens with a block
of the state in registers. Rows with more tokens: the chunked form of Yang et al., "Gated Delta Networks" (2024). With the decays
`G = cumsum(g)` inside a chunk, the corrections `delta` of its tokens solve

    (I + A) delta = beta (v - exp(G) k S),    A[i, j] = beta[i] exp(G[i] - G[j]) k[i] k[j] for j < i

`delta_solve` computes what does not depend on states, for all chunks at once: `(I + A)^-1 beta`, the products of queries and keys
with their decays, and the factors of the tokens. `delta_prefill` then walks the chunks of its row by five products.

Keys and queries enter the products as they are, and the results are divided by their norms. With keys of norm 1 both matrices
have small entries, so they are float16, which has eight times the precision of bfloat16.
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
    find_chunk,
    in_this_iteration,
    is_padding,
    numbered_chunk,
    row_end,
    row_tokens,
    softplus,
)


@triton.jit
def _inverse_norms(rows, NORMALIZE: tl.constexpr):
    """Inverse L2 norms of rows, float32; ones without NORMALIZE."""
    rows = rows.to(tl.float32)
    if NORMALIZE:
        return tl.rsqrt(tl.sum(rows * rows, 1) + 1e-6)
    return tl.full([rows.shape[0]], 1.0, tl.float32)


@triton.jit
def _gate_parameters(A_log, dt_bias, head, GATES: tl.constexpr):
    """A_log and dt_bias of a head, where the gates are computed from them."""
    if GATES:
        return tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    return 0.0, 0.0


@triton.jit
def _load_gates(g, beta, A_log, dt_bias, valid, GATES: tl.constexpr):
    """Log decay and rate of tokens of a head, float32, 0 where not `valid`; `g` and `beta` are their places, `A_log` and
    `dt_bias` those of `_gate_parameters`. GATES: those are projections; see the op."""
    decay = tl.load(g, mask=valid, other=0.0).to(tl.float32)
    loaded = tl.load(beta, mask=valid, other=0.0)
    rate = loaded.to(tl.float32)
    if GATES:
        step = softplus(decay + dt_bias)
        decay = tl.where(valid, -tl.exp(A_log) * step, 0.0)
        rate = tl.where(valid, (1.0 / (1.0 + tl.exp(-rate))).to(loaded.dtype).to(tl.float32), 0.0)
    return decay, rate


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def delta_scan(
    q, k, v, g, beta, A_log, dt_bias, out, state, slots, query_start, seq_lens, position, num_rows, num_tokens, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, g_stride, g_head_stride,
    beta_stride, beta_head_stride, out_stride, out_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BY_CHANNEL: tl.constexpr, NORMALIZE: tl.constexpr, DECODE_ONLY: tl.constexpr, FEW: tl.constexpr,
    GATES: tl.constexpr, ACCESS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK value channels of head `program_id(1)` of row `program_id(2)`, token after token; padded tokens become zero. Rows
    of more than FEW tokens are skipped.

    DECODE_ONLY: the previous kernel writes inputs, but neither the rows of the step nor states: both are loaded before the wait,
    bypassing L1.
    """
    if not DECODE_ONLY:
        pdl_wait(DEPENDENT)
    head, row = tl.program_id(1), tl.program_id(2)
    first, end = row_tokens(query_start, row, num_rows, num_tokens, DECODE_ONLY)
    if first >= end:
        return
    value_dim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key_dim = tl.arange(0, KEY_PAD)
    valid_value, valid_key = value_dim < VALUE_DIM, key_dim < KEY_DIM
    token = first.to(tl.int64)
    target = out + head * out_head_stride + value_dim
    if is_padding(slots, row, num_rows, DECODE_ONLY):
        if DECODE_ONLY:
            pdl_wait(DEPENDENT)
        for _ in range(first, end):
            tl.store(target + token * out_stride, tl.zeros([BLOCK], out.dtype.element_ty), mask=valid_value)
            token += 1
        return
    if end - first > FEW:
        return
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    place = state + ((slot * VALUE_HEADS + head) * KEY_DIM + key_dim[:, None]) * VALUE_DIM + value_dim[None, :]
    valid = valid_key[:, None] & valid_value[None, :]
    length = tl.load(seq_lens + row, cache_modifier=".cg")
    matrix = tl.load(place, mask=valid & (length > end - first), other=0.0, cache_modifier=".cg")
    if DECODE_ONLY:
        if GATES:  # noqa: SIM102 (known when the kernel is compiled)
            if (tl.program_id(0) == 0) & (row == 0):
                pdl_prefetch(A_log + head, DEPENDENT)
                pdl_prefetch(dt_bias + head, DEPENDENT)
        pdl_wait(DEPENDENT)
    log_rate, bias = _gate_parameters(A_log, dt_bias, head, GATES)
    end = row_end(end, length, position, slot, ACCESS)
    is_query = (tl.arange(0, 2) == 0)[:, None]
    q_row, k_row = q + head // GROUP * q_head_stride, k + head // GROUP * k_head_stride
    for _ in range(first, end):
        rate_place = beta + token * beta_stride + head * beta_head_stride
        decay_place = g + token * g_stride + head * g_head_stride
        if not BY_CHANNEL:
            decay, rate = _load_gates(decay_place, rate_place, log_rate, bias, True, GATES)
        # One load of both: each is followed by an exchange between threads, which later loads would wait for.
        both = tl.where(is_query, q_row + token * q_stride, k_row + token * k_stride) + key_dim[None, :]
        rows = tl.load(both, mask=valid_key[None, :], other=0.0).to(tl.float32)
        rows *= _inverse_norms(rows, NORMALIZE)[:, None]
        query, key = tl.sum(tl.where(is_query, rows, 0.0), 0), tl.sum(tl.where(is_query, 0.0, rows), 0)
        value = tl.load(v + token * v_stride + head * v_head_stride + value_dim, mask=valid_value, other=0.0)
        if BY_CHANNEL:
            rate = tl.load(rate_place).to(tl.float32)
            decay = tl.load(decay_place + key_dim, mask=valid_key, other=0.0)
            matrix *= tl.exp(decay.to(tl.float32))[:, None]
        else:
            matrix *= tl.exp(decay)
        delta = rate * (value.to(tl.float32) - tl.sum(matrix * key[:, None], 0))
        matrix += key[:, None] * delta[None, :]
        if ACCESS != COMMIT:
            result = tl.sum(matrix * query[:, None], 0) * scale
            tl.store(target + token * out_stride, result.to(out.dtype.element_ty), mask=valid_value)
        token += 1
    if ACCESS != READ:
        tl.store(place, matrix, mask=valid)


@triton.jit
def _invert_unit_lower(below, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """(I + below)^-1 of a strictly lower triangular matrix in float32, by products of matrices of `dtype`.

    Powers of `below` would need fewer products, and lose all digits where keys repeat. So blocks on the diagonal are inverted.
    That of two rows is I - below. With X, the inverse of blocks of one size, X - X B X is that of blocks twice as large, where B is
    what these have below the smaller ones.
    """
    at = tl.arange(0, CHUNK)
    row, column = at[:, None], at[None, :]
    result = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, below, 0.0)
    for bit in tl.static_range(1, 6):
        if CHUNK >> bit > 1:
            in_block = (row >> (bit + 1) == column >> (bit + 1)) & (row >> bit != column >> bit)
            known = result.to(dtype)
            added = tl.dot(tl.where(in_block, below, 0.0).to(dtype), known, input_precision="tf32x3")
            result -= tl.dot(known, added.to(dtype), input_precision="tf32x3")
    return result


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def delta_solve(
    q, k, g, beta, A_log, dt_bias, inverse, scores, factors, query_start, num_rows, num_tokens, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, g_stride, g_head_stride, beta_stride, beta_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr, FEW: tl.constexpr, GATES: tl.constexpr, SHARED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`inverse` and `scores` `[chunks, VALUE_HEADS, CHUNK, CHUNK]` and `factors` `[chunks, VALUE_HEADS, 4, CHUNK]` of value head
    `program_id(0)`, for the chunks of rows of more than FEW tokens, which with SHARED programs of the second dimension share.
    Chunk c of row i is at `first token of the row // CHUNK + i + c`.

    The factors are for products of keys with the state before the chunk, of queries with it, of keys with corrections for the state
    after the chunk, and the chunk's decay.
    """
    pdl_wait(DEPENDENT)
    if SHARED:
        count = count_chunks(query_start, num_rows, num_tokens, CHUNK, FEW, False)
        for number in range(tl.program_id(1), count, tl.num_programs(1)):
            row, first, end, begin = numbered_chunk(query_start, number, num_rows, num_tokens, CHUNK, FEW, False)
            chunk = first // CHUNK + row + (begin - first) // CHUNK
            _solve_chunk(
                q, k, g, beta, A_log, dt_bias, inverse, scores, factors, in_this_iteration(tl.program_id(0), DEPENDENT), chunk,
                begin, end, scale, q_stride, q_head_stride, k_stride, k_head_stride, g_stride, g_head_stride, beta_stride,
                beta_head_stride, VALUE_HEADS, GROUP, KEY_DIM, KEY_PAD, CHUNK, NORMALIZE, GATES,
            )  # fmt: skip
    else:
        chunk = tl.program_id(1)
        row, first, end, begin = find_chunk(query_start, chunk, num_rows, num_tokens, CHUNK)
        if (row < num_rows) & (begin < end) & (end - first > FEW):
            _solve_chunk(
                q, k, g, beta, A_log, dt_bias, inverse, scores, factors, tl.program_id(0), chunk,
                begin, end, scale, q_stride, q_head_stride, k_stride, k_head_stride, g_stride, g_head_stride, beta_stride,
                beta_head_stride, VALUE_HEADS, GROUP, KEY_DIM, KEY_PAD, CHUNK, NORMALIZE, GATES,
            )  # fmt: skip


@triton.jit
def _solve_chunk(
    q, k, g, beta, A_log, dt_bias, inverse, scores, factors, head, chunk, begin, end, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, g_stride, g_head_stride, beta_stride, beta_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The matrices and factors of one chunk of a value head."""
    at, key_dim = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD)
    token = (begin + at).to(tl.int64)
    valid = token < end
    by_key = valid[:, None] & (key_dim < KEY_DIM)[None, :]
    k_place = k + head // GROUP * k_head_stride + token[:, None] * k_stride + key_dim[None, :]
    q_place = q + head // GROUP * q_head_stride + token[:, None] * q_stride + key_dim[None, :]
    keys, query = tl.load(k_place, mask=by_key, other=0.0), tl.load(q_place, mask=by_key, other=0.0)
    log_rate, bias = _gate_parameters(A_log, dt_bias, head, GATES)
    g_place = g + token * g_stride + head * g_head_stride
    beta_place = beta + token * beta_stride + head * beta_head_stride
    decay, rate = _load_gates(g_place, beta_place, log_rate, bias, valid, GATES)
    k_factor, q_factor = _inverse_norms(keys, NORMALIZE), _inverse_norms(query, NORMALIZE) * scale
    total, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
    place = chunk.to(tl.int64) * VALUE_HEADS + head
    factor = factors + place * 4 * CHUNK + at
    tl.store(factor, tl.exp(total) * k_factor)
    tl.store(factor + CHUNK, tl.exp(total) * q_factor)
    tl.store(factor + 2 * CHUNK, tl.exp(whole - total) * k_factor)
    tl.store(factor + 3 * CHUNK, tl.exp(tl.zeros([CHUNK], tl.float32) + whole))
    between = tl.exp(tl.where(at[:, None] >= at[None, :], total[:, None] - total[None, :], float("-inf")))
    between *= k_factor[None, :]
    element = place * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
    local = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * between * q_factor[:, None]
    tl.store(scores + element, local.to(scores.dtype.element_ty))
    below = tl.dot(keys, tl.trans(keys), input_precision="tf32x3") * between * (k_factor * rate)[:, None]
    below = tl.where(at[:, None] > at[None, :], below, 0.0)
    system = _invert_unit_lower(below, inverse.dtype.element_ty, CHUNK) * rate[None, :]
    tl.store(inverse + element, system.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def delta_prefill(
    q, k, v, inverse, scores, factors, out, state, slots, query_start, seq_lens, num_rows, num_tokens,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, out_stride, out_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK value channels of head `program_id(1)` of a row, the `program_id(2)`-th of more than FEW tokens, chunk after chunk.

    All is transposed: what depends on the state is then the left operand of each product, which the tensor cores read from
    registers, and the right ones are read from shared memory as they were loaded.
    """
    pdl_wait(DEPENDENT)
    head = tl.program_id(1)
    row, first, end, _ = numbered_chunk(query_start, tl.program_id(2), num_rows, num_tokens, WHOLE, FEW, False)
    if row < 0:
        return
    at, key_dim = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD)
    value_dim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid_key, valid_value = key_dim < KEY_DIM, value_dim < VALUE_DIM
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * VALUE_HEADS + head) * KEY_DIM + key_dim[None, :]) * VALUE_DIM + value_dim[:, None]
    valid_state = valid_key[None, :] & valid_value[:, None]
    matrix = tl.load(place, mask=valid_state & (tl.load(seq_lens + row) > end - first), other=0.0)
    k_head = k + head // GROUP * k_head_stride + key_dim[None, :]
    q_head = q + head // GROUP * q_head_stride + key_dim[None, :]
    v_head = v + head * v_head_stride + value_dim[None, :]
    out_head = out + head * out_head_stride + value_dim[None, :]
    chunk = (first // CHUNK + row).to(tl.int64) * VALUE_HEADS + head
    element, factor = chunk * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :], factors + chunk * 4 * CHUNK
    wide: tl.constexpr = tl.bfloat16 if k.dtype.element_ty == tl.bfloat16 else tl.float32
    narrow: tl.constexpr = scores.dtype.element_ty
    for begin in tl.range(first, end, CHUNK, num_stages=STAGES):
        token = (begin + at).to(tl.int64)[:, None]
        by_key, by_value = (token < end) & valid_key[None, :], (token < end) & valid_value[None, :]
        keys = tl.load(k_head + token * k_stride, mask=by_key, other=0.0).to(wide)
        query = tl.load(q_head + token * q_stride, mask=by_key, other=0.0).to(wide)
        values = tl.load(v_head + token * v_stride, mask=by_value, other=0.0)
        system, local = tl.load(inverse + element), tl.load(scores + element)
        of_keys, of_query, of_delta = (
            tl.load(factor + at),
            tl.load(factor + CHUNK + at),
            tl.load(factor + 2 * CHUNK + at),
        )
        decay = tl.load(factor + 3 * CHUNK)
        before = matrix.to(wide)
        predicted = tl.dot(before, tl.trans(keys), input_precision="tf32x3") * of_keys[None, :]
        error = tl.trans(values).to(tl.float32) - predicted
        largest = tl.maximum(tl.max(tl.abs(error), 1), 1e-20)[:, None]  # float16 holds quotients of any values
        inverse_largest = 1.0 / largest
        delta = tl.dot((error * inverse_largest).to(narrow), tl.trans(system), input_precision="tf32x3")
        result = tl.dot(before, tl.trans(query), input_precision="tf32x3") * (of_query[None, :] * inverse_largest)
        result = tl.dot(delta.to(narrow), tl.trans(local), result, input_precision="tf32x3") * largest
        delta *= of_delta[None, :] * largest
        added = delta.to(wide)
        matrix = tl.dot(added, keys, matrix * decay, input_precision="tf32x3")
        if wide == tl.bfloat16:  # where keys repeat, roundings of corrections exceed their sum
            matrix = tl.dot((delta - added.to(tl.float32)).to(wide), keys, matrix)
        tl.store(out_head + token * out_stride, tl.trans(result.to(out.dtype.element_ty)), mask=by_value)
        element += VALUE_HEADS * CHUNK * CHUNK
        factor += VALUE_HEADS * 4 * CHUNK
    tl.store(place, matrix, mask=valid_state)
