"""Triton versions of `torchweave.ops.sampling.philox`: equal integer words, and noise equal up to the rounding of `log`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(counter, position, seed_lo, seed_hi):
    """philox.philox_4x32 on (counter, position, 0, 0)."""
    c0 = counter.to(tl.uint32)
    c1 = (counter * 0 + position).to(tl.uint32)
    c2 = (counter * 0).to(tl.uint32)
    c3 = c2
    k0 = c2 + seed_lo.to(tl.uint32, bitcast=True)
    k1 = c2 + seed_hi.to(tl.uint32, bitcast=True)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1)


@triton.jit
def gumbel(word):
    """philox.gumbel."""
    u = ((word & 0x7FFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * 0.3333333432674408))
    complement = (16777216 - (word >> 8).to(tl.int32)).to(tl.float32) * 5.960464477539063e-08
    return -tl.log(tl.where(word < 0x800000, series, -tl.log(complement)))
