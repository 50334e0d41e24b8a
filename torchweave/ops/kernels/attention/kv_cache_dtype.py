"""Triton: keys and values as the paged cache keeps them, for every kernel that writes it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_kv(x, scale, dtype: tl.constexpr, KV_FP8_MAX: tl.constexpr):
    """Keys or values as the cache keeps them: as they are, or where LIMIT is the largest number of its `dtype`, over a scale
    and rounded once. See `torchweave.ops.attention.kv_cache_dtype.quantize_kv`."""
    if KV_FP8_MAX > 0:
        x = x.to(tl.float32)
        x = tl.clamp(tl.div_rn(x, tl.zeros_like(x) + scale), -KV_FP8_MAX, KV_FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
