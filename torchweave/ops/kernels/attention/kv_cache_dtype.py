"""Triton: keys and values as the paged cache keeps them, for every kernel that writes it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_kept(x, scale, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """Keys or values as the cache keeps them: as they are, or where LIMIT is the largest number of its `dtype`, over a scale
    and rounded once. See `torchweave.ops.attention.kv_cache_dtype.keep`."""
    if LIMIT > 0:
        x = x.to(tl.float32)
        x = tl.clamp(tl.div_rn(x, tl.zeros_like(x) + scale), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
