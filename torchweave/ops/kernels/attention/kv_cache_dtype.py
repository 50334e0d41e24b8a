"""Triton: quantization of keys and values for every kernel that writes the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_kv(x, scale, dtype: tl.constexpr, KV_FP8_MAX: tl.constexpr):
    """Keys or values in the cache's `dtype`: unchanged where KV_FP8_MAX is 0, else divided by the scale and rounded once.
    KV_FP8_MAX is the largest finite value of `dtype`. See `torchweave.ops.attention.kv_cache_dtype.quantize_kv`."""
    if KV_FP8_MAX > 0:
        x = x.to(tl.float32)
        x = tl.clamp(tl.div_rn(x, tl.zeros_like(x) + scale), -KV_FP8_MAX, KV_FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
