"""Triton: words of two floats, so that an element of 16 bits that waits for its use takes half a register and not a whole one.

Triton 3.8 keeps each 16-bit element that a loop carries in a register of its own. It divides loaded words at once, before the code
that follows the load: the program waits for memory there, and holds twice the registers. Integers stay as loaded.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(pointers, word, mask, EVICTION: tl.constexpr):
    """The words at index `word` from each pointer to floats, whose address divides by the size of a word; 0 outside the mask."""
    WORD: tl.constexpr = tl.int32 if pointers.dtype.element_ty.primitive_bitwidth == 16 else tl.int64
    return tl.load(pointers.to(tl.pointer_type(WORD)) + word, mask=mask, other=0, eviction_policy=EVICTION)


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The even and the odd elements of `words` of the dtype, as float32."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300 (a type, not a constant)
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    else:
        BITS: tl.constexpr = DTYPE.primitive_bitwidth
        HALF: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
        even = words.to(HALF).to(DTYPE, bitcast=True).to(tl.float32)
        odd = (words >> BITS).to(HALF).to(DTYPE, bitcast=True).to(tl.float32)
    return even, odd
