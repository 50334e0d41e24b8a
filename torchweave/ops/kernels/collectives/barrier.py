"""Triton: barrier between programs of several ranks, by one word for every program of every rank in symmetric memory.

Programs with the same index meet over all ranks: each writes the barrier's epoch into its words on the other ranks
(`st.release.sys`) and waits until its own words reach it (`ld.acquire.sys`). Words only grow, so nothing is reset and a rank
may be one epoch ahead; epochs are compared by their difference, which wraps. Writes of any thread before the barrier are
visible to all threads of the other programs after it: a block barrier stands on both sides of the signals.

A wait always ends: when the host writes the status word (a rank has died), or after a timeout by the GPU's clock, when the
program writes the status word itself. From then on results are invalid, and the host reads that from the status word.

`table` is int64 `[SIZE + 2]`: addresses of the ranks' memory, that of the status word, and the timeout in nanoseconds.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

_SIGNAL_PTX: tl.constexpr = tl.constexpr("""{
    .reg .pred %mine;
    .reg .u32 %thread;
    mov.u32 %thread, %tid.x;
    setp.lt.u32 %mine, %thread, $3;
    @%mine st.release.sys.global.u32 [$1], $2;
    mov.u32 $0, 0;
}""")
"""Store $2 at address $1, once: of all threads that hold one of $3 addresses, the first $3 hold them all."""

_WAIT_PTX: tl.constexpr = tl.constexpr("""{
    .reg .pred %ends;
    .reg .u32 %thread, %word, %polls;
    .reg .s32 %ahead;
    .reg .u64 %now, %end;
    mov.u32 %thread, %tid.x;
    mov.u32 %polls, 0;
    mov.u64 %end, 0;
    setp.ge.u32 %ends, %thread, $5;
    @%ends bra ended;
again:
    ld.acquire.sys.global.u32 %word, [$1];
    sub.s32 %ahead, %word, $2;
    setp.ge.s32 %ends, %ahead, 0;
    @%ends bra ended;
    add.u32 %polls, %polls, 1;
    and.b32 %word, %polls, 255;
    setp.ne.u32 %ends, %word, 0;
    @%ends bra again;
    ld.relaxed.sys.global.u32 %word, [$3];
    setp.ne.u32 %ends, %word, 0;
    @%ends bra ended;
    mov.u64 %now, %globaltimer;
    setp.eq.u64 %ends, %end, 0;
    @%ends add.u64 %end, %now, $4;
    setp.lt.u64 %ends, %now, %end;
    @%ends bra again;
    st.relaxed.sys.global.u32 [$3], 1;
ended:
    mov.u32 $0, 0;
}""")
"""Wait until the word at $1 is $2 or later; every 256 polls, check the status at $3 and the timeout of $4 nanoseconds. $5: as
`_SIGNAL_PTX`'s $3."""


@triton.jit
def peer_addresses(table, SIZE: tl.constexpr):
    """Address of each rank's memory: a tuple of SIZE."""
    addresses = ()
    for rank in tl.static_range(SIZE):
        addresses = addresses + (tl.load(table + rank),)  # noqa: RUF005 (Triton knows no other way)
    return addresses


@triton.jit
def as_pointer(address, like):
    """An address, a multiple of 16, as a pointer of the type of `like`."""
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def barrier_addresses(table, flags_at, rank, SIZE: tl.constexpr):
    """Constant arguments of `rank_barrier`: addresses of this program's words on the other ranks and here, status, timeout."""
    ranks = tl.arange(0, SIZE)
    first = flags_at + tl.program_id(0) * (SIZE * 4)
    peer_flags = tl.load(table + ranks) + first + rank * 4
    own_flags = tl.load(table + rank) + first + ranks * 4
    return peer_flags, own_flags, tl.load(table + SIZE), tl.load(table + SIZE + 1)


@triton.jit
def rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch, SIZE: tl.constexpr):
    """Barrier `epoch` of this program with those of the same index on all ranks; see the module."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(_SIGNAL_PTX, "=r,l,r,r", [peer_flags, epoch, SIZE], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(
        _WAIT_PTX, "=r,l,r,l,l,r", [own_flags, epoch, status, timeout_ns, SIZE], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
