"""Triton: rotary embedding of queries and keys, with an optional RMSNorm before it. A program owns some heads of one token."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.attention.kv_cache_dtype import quantize_kv
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.norm import scale_rows
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2


class QKNorm(NamedTuple):
    """RMSNorm of each head before the rotary embedding; the arguments of `torchweave::qk_norm_rope`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0
    wide: bool = False


class CacheWrite(NamedTuple):
    """Paged-cache destination of a step's keys and values: values `[T, KH, Dv]`, one layer's cache, the slot of each token, and
    the scales of an FP8 cache, whose largest number is `kv_fp8_max` (0: unquantized)."""

    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    kv_fp8_max: float = 0.0


@triton.jit
def apply_rotary(low, high, cos_low, cos_high, sin_low, sin_high, dtype: tl.constexpr):
    """Rotate both halves: float32 in and out, every product rounded to `dtype`, that of cos."""
    new_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
    new_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    return new_low, new_high


@triton.jit
def load_heads_with_rope(
    rows, mask, weight, cos, sin, eps, offset,
    DIM: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Whole heads `[N, PAD]` in their own dtype, normed and rotated, for kernels that use them in registers.

    rows: pointers `[N, 1]` to the heads; mask `[N, 1]`; cos, sin: of their token. HALF 0 leaves the heads unchanged.
    """
    dim = tl.arange(0, PAD)
    inside = dim < DIM
    mask = mask & inside[None, :]
    x = tl.load(rows + dim[None, :], mask=mask, other=0.0)
    if HALF > 0:
        dtype = x.dtype
        pair_dim = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
        other = tl.load(rows + pair_dim[None, :], mask=mask, other=0.0).to(tl.float32)
        own = x.to(tl.float32)
        if NORM:
            norm = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
            own_weight = tl.load(weight + dim, mask=inside, other=0.0)[None, :]
            other_weight = tl.load(weight + pair_dim, mask=inside, other=0.0)[None, :]
            own = scale_rows(own, norm, own_weight, offset, True, WIDE, dtype)
            other = scale_rows(other, norm, other_weight, offset, True, WIDE, dtype)
        angle = dim < 2 * HALF
        cosine = tl.load(cos + dim, mask=angle, other=1.0).to(tl.float32)[None, :]
        sine = tl.load(sin + dim, mask=angle, other=0.0).to(tl.float32)[None, :]
        step = cos.dtype.element_ty
        product = (other * sine).to(step).to(tl.float32)
        x = ((own * cosine).to(step).to(tl.float32) + tl.where(dim < HALF, -product, product)).to(step).to(dtype)
    return x


@triton.jit
def _load_rope_heads(
    x, weight, cos, sin, block, num_heads, token, x_stride, x_head_stride, eps, offset,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of heads of one tensor, float32: the two rotated halves, and the unrotated rest [2 * HALF, DIM)."""
    head = block * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF_PAD)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    real = (head < num_heads)[:, None]
    rotary_mask = real & (half < HALF)[None, :]
    row = x + token * x_stride + head[:, None] * x_head_stride
    low = tl.load(row + half[None, :], mask=rotary_mask, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = tl.load(row + HALF + half[None, :], mask=rotary_mask, other=0.0).to(tl.float32)
    remaining = tl.zeros([HEADS, REST_PAD], tl.float32)
    if 2 * HALF < DIM:
        remaining = tl.load(row + rest[None, :], mask=real & (rest < DIM)[None, :], other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(remaining * remaining, 1)
        norm = tl.rsqrt(squares / DIM + eps)[:, None]
        low_weight = tl.load(weight + half, mask=half < HALF, other=0.0)[None, :]
        high_weight = tl.load(weight + HALF + half, mask=half < HALF, other=0.0)[None, :]
        low = scale_rows(low, norm, low_weight, offset, True, WIDE, dtype)
        high = scale_rows(high, norm, high_weight, offset, True, WIDE, dtype)
        if 2 * HALF < DIM:
            rest_weight = tl.load(weight + rest, mask=rest < DIM, other=0.0)[None, :]
            remaining = scale_rows(remaining, norm, rest_weight, offset, True, WIDE, dtype)
    angle = half < HALF
    dtype = cos.dtype.element_ty
    cos_low = tl.load(cos + half, mask=angle, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + half, mask=angle, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + half, mask=angle, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + half, mask=angle, other=0.0).to(tl.float32)[None, :]
    low, high = apply_rotary(low, high, cos_low, cos_high, sin_low, sin_high, dtype)
    return low, high, remaining


@triton.jit
def _store_heads(
    out, low, high, remaining, block, num_heads, row, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    KV_FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Store the result of `_load_rope_heads` into row `row` of out [rows, num_heads, DIM]. KV_FP8_MAX: see `quantize_kv`."""
    head = block * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF_PAD)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    real = (head < num_heads)[:, None]
    dtype = out.dtype.element_ty
    target = out + (row * num_heads + head[:, None]) * DIM
    rotary_mask = real & (half < HALF)[None, :]
    tl.store(target + half[None, :], quantize_kv(low, scale, dtype, KV_FP8_MAX), mask=rotary_mask)
    tl.store(target + HALF + half[None, :], quantize_kv(high, scale, dtype, KV_FP8_MAX), mask=rotary_mask)
    if 2 * HALF < DIM:
        tl.store(
            target + rest[None, :], quantize_kv(remaining, scale, dtype, KV_FP8_MAX), mask=real & (rest < DIM)[None, :]
        )


@triton.jit
def rope_kernel(
    q, k, v, q_weight, k_weight, cos, sin, q_out, k_out, k_cache, v_cache, slot_mapping, eps, offset, k_scale, v_scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, cos_stride, sin_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, CACHE: tl.constexpr, DEPENDENT: tl.constexpr, KV_FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads, then blocks of key heads). CACHE: also write keys and values to the paged cache."""
    pdl_wait(DEPENDENT)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos + token * cos_stride, sin + token * sin_stride
    if block < Q_BLOCKS:
        low, high, rest = _load_rope_heads(
            q, q_weight, cos, sin, block, Q_HEADS, token, q_stride, q_head_stride, eps, offset,
            HEADS, DIM, HALF, HALF_PAD, REST_PAD, NORM, WIDE,
        )  # fmt: skip
        _store_heads(q_out, low, high, rest, block, Q_HEADS, token, 1.0, HEADS, DIM, HALF, HALF_PAD, REST_PAD, 0.0)
    else:
        block -= Q_BLOCKS
        low, high, rest = _load_rope_heads(
            k, k_weight, cos, sin, block, K_HEADS, token, k_stride, k_head_stride, eps, offset,
            HEADS, DIM, HALF, HALF_PAD, REST_PAD, NORM, WIDE,
        )  # fmt: skip
        _store_heads(k_out, low, high, rest, block, K_HEADS, token, 1.0, HEADS, DIM, HALF, HALF_PAD, REST_PAD, 0.0)
        if CACHE:
            cache_slot = tl.load(slot_mapping + token)
            if cache_slot >= 0:
                out_dtype: tl.constexpr = k_out.dtype.element_ty  # the cache stores the values of k_out
                _store_heads(
                    k_cache, low.to(out_dtype), high.to(out_dtype), rest.to(out_dtype), block, K_HEADS, cache_slot, k_scale,
                    HEADS, DIM, HALF, HALF_PAD, REST_PAD, KV_FP8_MAX,
                )  # fmt: skip
                head = (block * HEADS + tl.arange(0, HEADS))[:, None]
                dim = tl.arange(0, VALUE_PAD)[None, :]
                value_mask = (head < K_HEADS) & (dim < VALUE_DIM)
                value = tl.load(v + token * v_stride + head * v_head_stride + dim, mask=value_mask)
                value = quantize_kv(value, v_scale, v_cache.dtype.element_ty, KV_FP8_MAX)
                tl.store(v_cache + (cache_slot * K_HEADS + head) * VALUE_DIM + dim, value, mask=value_mask)


def launch_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norm: QKNorm | None = None, cache: CacheWrite | None = None
) -> tuple[Tensor, Tensor]:
    """See `torchweave.ops.rope.rope` and `qk_norm_rope`; q, k and v may be strided views of one product."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    heads, kv_heads, dim, half = q.shape[-2], k.shape[-2], q.shape[-1], cos.shape[-1] // 2
    tokens = q.shape[-3]
    assert q.numel() == tokens * heads * dim, "the dimensions before the tokens are 1"
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if not tokens:
        return q_out, k_out
    v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_fp8_max = CacheWrite(k, k, k, k) if cache is None else cache
    heads_per_program = max(1, min(2048 // next_power_of_2(dim), next_power_of_2(max(heads, kv_heads))))
    q_blocks, dependent = cdiv(heads, heads_per_program), supports_pdl(q.device)
    rope_kernel[(tokens, q_blocks + cdiv(kv_heads, heads_per_program))](
        q, k, v, q if norm is None else norm.q_weight, k if norm is None else norm.k_weight, cos, sin, q_out, k_out,
        k_cache, v_cache, slot_mapping, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset,
        k_scale, v_scale,
        q.stride(-3), q.stride(-2), k.stride(-3), k.stride(-2), v.stride(-3), v.stride(-2), cos.shape[-1], sin.shape[-1],
        Q_HEADS=heads, K_HEADS=kv_heads, Q_BLOCKS=q_blocks, HEADS=heads_per_program, DIM=dim,
        VALUE_DIM=v.shape[-1], VALUE_PAD=next_power_of_2(v.shape[-1]),
        HALF=half, HALF_PAD=max(2, next_power_of_2(half)), REST_PAD=max(2, next_power_of_2(dim - 2 * half)),
        NORM=norm is not None, WIDE=norm is not None and norm.wide, CACHE=cache is not None,
        DEPENDENT=dependent, KV_FP8_MAX=kv_fp8_max, num_warps=4, enable_fp_fusion=False, **pdl_options(dependent),
    )  # fmt: skip
    return q_out, k_out
