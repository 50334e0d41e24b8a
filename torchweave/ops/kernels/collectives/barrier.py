"""Triton: how programs of several ranks meet. Each rank has a word for every program of every rank, in memory that all ranks see.

Programs with the same number meet, over all ranks: each writes the number of the meeting into the words that the others wait on
(`st.release.sys`) and waits until its own are as large (`ld.acquire.sys`). Words only grow, so that nothing is ever reset and a
rank may be one meeting ahead; numbers are compared by their difference, which wraps. What any thread of a program wrote before
the meeting can be read by all threads of the others after it: a barrier of the block stands on both sides of the signals.

A wait ends in any case: when the host writes into the status word (a rank is known to have died), and after a time by the GPU's
clock, when the program writes into it itself. From then on results are worth nothing, which the host sees there.

`table` is int64 `[SIZE + 2]`: addresses of the ranks' memory, then that of the status word, then the limit in nanoseconds.
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
"""To address $1 the number $2, once: of all threads that hold one of $3 addresses, the first $3 hold them all."""

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
"""Until the word at $1 is $2 or later; every 256 polls: is there a status at $3, have $4 nanoseconds passed? $5 as
`_SIGNAL_PTX`'s $3."""


@triton.jit
def peer_addresses(table, SIZE: tl.constexpr):
    """Where the memory of each rank is: a tuple of SIZE addresses."""
    addresses = ()
    for rank in tl.static_range(SIZE):
        addresses = addresses + (tl.load(table + rank),)  # noqa: RUF005 (Triton knows no other way)
    return addresses


@triton.jit
def as_pointer(address, like):
    """An address, a multiple of 16, as a pointer to what `like` points to."""
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def barrier_addresses(table, flags_at, rank, SIZE: tl.constexpr):
    """What `rank_barrier` needs, all of it constant: where this program's words are with the others and here, status and limit."""
    ranks = tl.arange(0, SIZE)
    first = flags_at + tl.program_id(0) * (SIZE * 4)
    peer_flags = tl.load(table + ranks) + first + rank * 4
    own_flags = tl.load(table + rank) + first + ranks * 4
    return peer_flags, own_flags, tl.load(table + SIZE), tl.load(table + SIZE + 1)


@triton.jit
def rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch, SIZE: tl.constexpr):
    """This program and those of the same number on all ranks meet for the `epoch`-th time; see the module."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(_SIGNAL_PTX, "=r,l,r,r", [peer_flags, epoch, SIZE], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(
        _WAIT_PTX, "=r,l,r,l,l,r", [own_flags, epoch, status, timeout_ns, SIZE], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
