"""Triton: gated delta rule over the rows of a step.

Rows with few tokens, and all rows where the decay has a value for each key channel: a program walks its row's tokens with a block
of the state in registers. Rows with more tokens: the chunked form of Yang et al., "Gated Delta Networks" (2024). With the decays
`G = cumsum(g)` inside a chunk, the corrections `delta` of its tokens solve

    (I + A) delta = beta (v - exp(G) k S),    A[i, j] = beta[i] exp(G[i] - G[j]) k[i] k[j] for j < i

`delta_solve` inverts I + A for all chunks at once, by forward substitution: powers of A, which need fewer steps, lose all digits
where keys repeat. `delta_prefill` then walks the chunks of its row on the tensor cores.
"""

# Triton's decorators are untyped.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_prefetch, pdl_wait
from torchweave.ops.kernels.recurrent.chunks import COMMIT, READ, find_chunk, is_padding, row_end, row_tokens, softplus


@triton.jit
def _unit_rows(rows, NORMALIZE: tl.constexpr):
    """Rows in float32, of length 1 if NORMALIZE."""
    rows = rows.to(tl.float32)
    if NORMALIZE:
        rows *= tl.rsqrt(tl.sum(rows * rows, 1) + 1e-6)[:, None]
    return rows


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
        rows = _unit_rows(tl.load(both, mask=valid_key[None, :], other=0.0), NORMALIZE)
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
def _rounded(x):
    """float32 with the 10 bits of tf32, to the nearest."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b. The tensor cores cut numbers to tf32, an error of one sign that adds up over a chunk, so they are rounded first."""
    if PRECISION == "tf32":
        a, b = _rounded(a), _rounded(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def delta_solve(
    k, g, beta, A_log, dt_bias, inverse, query_start, num_rows, num_tokens,
    k_stride, k_head_stride, g_stride, g_head_stride, beta_stride, beta_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`inverse[chunk, head]` `[CHUNK, CHUNK]` of chunk `program_id(0)` and value head `program_id(1)`, for rows of more than FEW
    tokens."""
    pdl_wait(DEPENDENT)
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, first, end, begin = find_chunk(query_start, chunk, num_rows, num_tokens, CHUNK)
    if row == num_rows:
        return
    if (begin >= end) | (end - first <= FEW):
        return
    at, key_dim = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD)
    token = (begin + at).to(tl.int64)
    valid = token < end
    place = k + head // GROUP * k_head_stride + token[:, None] * k_stride + key_dim[None, :]
    keys = _unit_rows(tl.load(place, mask=valid[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0), NORMALIZE)
    log_rate, bias = _gate_parameters(A_log, dt_bias, head, GATES)
    g_place, beta_place = (
        g + token * g_stride + head * g_head_stride,
        beta + token * beta_stride + head * beta_head_stride,
    )
    decay, rate = _load_gates(g_place, beta_place, log_rate, bias, valid, GATES)
    total = tl.cumsum(decay, 0)
    # Transposed: entry [j, i] is A[i, j], so that a row of A comes out along the rows of `result`.
    between = tl.exp(tl.where(at[:, None] < at[None, :], total[None, :] - total[:, None], float("-inf")))
    entries = _product(keys, tl.trans(keys), PRECISION) * between * rate[None, :]
    result = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        factors = tl.sum(tl.where(at[None, :] == i, entries, 0.0), 1)
        known = tl.sum(factors[:, None] * result, 0)
        result = tl.where(at[:, None] == i, result - known[None, :], result)
    place = inverse + (chunk.to(tl.int64) * VALUE_HEADS + head) * CHUNK * CHUNK
    tl.store(place + at[:, None] * CHUNK + at[None, :], result)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def delta_prefill(
    q, k, v, g, beta, A_log, dt_bias, inverse, out, state, slots, query_start, seq_lens, num_rows, num_tokens, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, g_stride, g_head_stride,
    beta_stride, beta_head_stride, out_stride, out_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr,
    GATES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK value channels of head `program_id(1)` of row `program_id(2)`, if it has more than FEW tokens, chunk after chunk."""
    pdl_wait(DEPENDENT)
    head, row = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - first <= FEW:
        return
    at, key_dim = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD)
    value_dim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid_key, valid_value = key_dim < KEY_DIM, value_dim < VALUE_DIM
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * VALUE_HEADS + head) * KEY_DIM + key_dim[:, None]) * VALUE_DIM + value_dim[None, :]
    valid_state = valid_key[:, None] & valid_value[None, :]
    matrix = tl.load(place, mask=valid_state & (tl.load(seq_lens + row) > end - first), other=0.0)
    inverse += ((first // CHUNK + row).to(tl.int64) * VALUE_HEADS + head) * CHUNK * CHUNK
    inverse_place = inverse + at[:, None] * CHUNK + at[None, :]
    k_head, q_head = k + head // GROUP * k_head_stride, q + head // GROUP * q_head_stride
    log_rate, bias = _gate_parameters(A_log, dt_bias, head, GATES)
    v_head, g_head, beta_head = v + head * v_head_stride, g + head * g_head_stride, beta + head * beta_head_stride
    for begin in tl.range(first, end, CHUNK):
        token = (begin + at).to(tl.int64)
        valid = token < end
        by_key, by_value = valid[:, None] & valid_key[None, :], valid[:, None] & valid_value[None, :]
        keys = tl.load(k_head + token[:, None] * k_stride + key_dim[None, :], mask=by_key, other=0.0)
        query = tl.load(q_head + token[:, None] * q_stride + key_dim[None, :], mask=by_key, other=0.0)
        keys, query = _unit_rows(keys, NORMALIZE), _unit_rows(query, NORMALIZE) * scale
        values = tl.load(v_head + token[:, None] * v_stride + value_dim[None, :], mask=by_value, other=0.0)
        g_place, beta_place = g_head + token * g_stride, beta_head + token * beta_stride
        decay, rate = _load_gates(g_place, beta_place, log_rate, bias, valid, GATES)
        total, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        before = _product(keys, matrix, PRECISION) * tl.exp(total)[:, None]
        delta = _product(tl.load(inverse_place), (values.to(tl.float32) - before) * rate[:, None], PRECISION)
        between = tl.exp(tl.where(at[:, None] >= at[None, :], total[:, None] - total[None, :], float("-inf")))
        scores = _product(query, tl.trans(keys), PRECISION) * between
        result = _product(query, matrix, PRECISION) * tl.exp(total)[:, None] + _product(scores, delta, PRECISION)
        target = out + token[:, None] * out_stride + head * out_head_stride + value_dim[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=by_value)
        keys_at_end = keys * tl.exp(whole - total)[:, None]
        matrix = matrix * tl.exp(whole) + _product(tl.trans(keys_at_end), delta, PRECISION)
        inverse_place += VALUE_HEADS * CHUNK * CHUNK
    tl.store(place, matrix, mask=valid_state)
