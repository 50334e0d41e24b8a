"""Triton: gated delta rule over the rows of a step. A program walks its row's tokens with a block of the state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_wait
from torchweave.ops.kernels.recurrent.chunks import is_padding, row_tokens


@triton.jit
def _inverse_norm(x):
    return tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def delta_scan(
    q, k, v, g, beta, out, state, slots, query_start, seq_lens, num_rows, num_tokens, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, g_stride, g_head_stride,
    beta_stride, beta_head_stride, out_stride, out_head_stride,
    VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BY_CHANNEL: tl.constexpr, NORMALIZE: tl.constexpr, DECODE_ONLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK value channels of head `program_id(1)` of row `program_id(2)`, token after token; padded tokens become zero."""
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
        for _ in range(first, end):
            tl.store(target + token * out_stride, tl.zeros([BLOCK], out.dtype.element_ty), mask=valid_value)
            token += 1
        return
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * VALUE_HEADS + head) * KEY_DIM + key_dim[:, None]) * VALUE_DIM + value_dim[None, :]
    valid = valid_key[:, None] & valid_value[None, :]
    matrix = tl.load(place, mask=valid & (tl.load(seq_lens + row) > end - first), other=0.0)
    q_row, k_row = q + head // GROUP * q_head_stride + key_dim, k + head // GROUP * k_head_stride + key_dim
    for _ in range(first, end):
        query = tl.load(q_row + token * q_stride, mask=valid_key, other=0.0).to(tl.float32)
        key = tl.load(k_row + token * k_stride, mask=valid_key, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + head * v_head_stride + value_dim, mask=valid_value, other=0.0)
        rate = tl.load(beta + token * beta_stride + head * beta_head_stride).to(tl.float32)
        if NORMALIZE:
            query *= _inverse_norm(query)
            key *= _inverse_norm(key)
        if BY_CHANNEL:
            decay = tl.load(g + token * g_stride + head * g_head_stride + key_dim, mask=valid_key, other=0.0)
            matrix *= tl.exp(decay.to(tl.float32))[:, None]
        else:
            matrix *= tl.exp(tl.load(g + token * g_stride + head * g_head_stride).to(tl.float32))
        delta = rate * (value.to(tl.float32) - tl.sum(matrix * key[:, None], 0))
        matrix += key[:, None] * delta[None, :]
        result = tl.sum(matrix * query[:, None], 0) * scale
        tl.store(target + token * out_stride, result.to(out.dtype.element_ty), mask=valid_value)
        token += 1
    tl.store(place, matrix, mask=valid)
