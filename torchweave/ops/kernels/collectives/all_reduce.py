"""Triton: collectives over symmetric memory: one-shot and two-shot all-reduce, and all-gather of equal parts.

A kind of launch has a fixed number of programs for all sizes, the same on every rank, and each program counts its barriers in
`counters`: so the ranks agree on the launch's epoch without the host, and a CUDA graph can replay it. Sums are float32 in the
order of the ranks.

PHASES selects the work (production sets all bits; tests run one phase of every rank after the other, in one process):
1 write this rank's operand to symmetric memory, unless it is there; 2 barrier; 4 read the operands and add; 8 gather the sums.
NUM_BARRIERS is 2 where the operand's memory is not double-buffered: see `torchweave.ops.kernels.collectives.workspace`.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.collectives.barrier import as_pointer, barrier_addresses, peer_addresses, rank_barrier
from torchweave.ops.kernels.collectives.workspace import ALL_PHASES, PROGRAMS, OperandLocation, SymmetricWorkspace
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.sizes import cdiv


@triton.jit
def sum_of_ranks(peer_buffers, at, element, mask, like, SIZE: tl.constexpr):
    """float32 sum of `element` over the ranks' operands, which begin at byte `at` of each rank's memory."""
    total = tl.load(as_pointer(peer_buffers[0] + at, like) + element, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(as_pointer(peer_buffers[rank] + at, like) + element, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank"])
def one_shot_kernel(
    x, out, table, counters, num, rank, flags_at, data_at, other_at,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGED: tl.constexpr, NUM_BARRIERS: tl.constexpr, PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [num] = the sum of x over ranks. STAGED: copy x to `data_at` or `other_at` alternately; else it is at `data_at`."""
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    first, column = program * BLOCK, tl.arange(0, BLOCK)
    peer_buffers, own_buffer = peer_addresses(table, SIZE), tl.load(table + rank)
    peer_flags, own_flags, status, timeout_ns = barrier_addresses(table, flags_at, rank, SIZE)
    pdl_wait(DEPENDENT)
    epoch = tl.load(counters + program) + NUM_BARRIERS
    at = tl.where(epoch % 2 == 0, data_at, other_at) if STAGED else data_at
    if STAGED and PHASES & 1:
        staging = as_pointer(own_buffer + at, x)
        for start in range(first, num, step):
            element = start + column
            tl.store(staging + element, tl.load(x + element, mask=element < num), mask=element < num)
    if PHASES & 2:  # noqa: SIM102 (PHASES is a constexpr)
        if first < num:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch - NUM_BARRIERS + 1, SIZE)
    if PHASES & 4:
        for start in range(first, num, step):
            element = start + column
            total = sum_of_ranks(peer_buffers, at, element, element < num, x, SIZE)
            tl.store(out + element, total.to(out.dtype.element_ty), mask=element < num)
        tl.store(counters + program, epoch)
    if NUM_BARRIERS == 2 and PHASES & 2:  # noqa: SIM102 (PHASES is a constexpr)
        if first < num:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch, SIZE)


@triton.jit(do_not_specialize=["rank"])
def gather_kernel(
    x, out, table, counters, num, inner, rank, flags_at, data_at, other_at,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_BARRIERS: tl.constexpr, PHASES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [num / inner, SIZE, inner] = x [num / inner, inner] of every rank, copied to `data_at` or `other_at` alternately."""
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    first, column = program * BLOCK, tl.arange(0, BLOCK)
    peer_buffers, own_buffer = peer_addresses(table, SIZE), tl.load(table + rank)
    peer_flags, own_flags, status, timeout_ns = barrier_addresses(table, flags_at, rank, SIZE)
    pdl_wait(DEPENDENT)
    epoch = tl.load(counters + program) + NUM_BARRIERS
    at = tl.where(epoch % 2 == 0, data_at, other_at)
    if PHASES & 1:
        staging = as_pointer(own_buffer + at, x)
        for start in range(first, num, step):
            element = start + column
            tl.store(staging + element, tl.load(x + element, mask=element < num), mask=element < num)
    if PHASES & 2:  # noqa: SIM102 (PHASES is a constexpr)
        if first < num:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch - NUM_BARRIERS + 1, SIZE)
    if PHASES & 4:
        for start in range(first, num, step):
            element = start + column
            target = element // inner * (SIZE * inner) + element % inner
            for other in tl.static_range(SIZE):
                value = tl.load(as_pointer(peer_buffers[other] + at, x) + element, mask=element < num)
                tl.store(out + target + other * inner, value, mask=element < num)
        tl.store(counters + program, epoch)
    if NUM_BARRIERS == 2 and PHASES & 2:  # noqa: SIM102 (PHASES is a constexpr)
        if first < num:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch, SIZE)


@triton.jit(do_not_specialize=["rank"])
def two_shot_kernel(
    x, out, table, counters, num, share, rank, flags_at, data_at, sums_at,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGED: tl.constexpr, PHASES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [num] = the sum of x over ranks; every rank adds the `share` elements from `rank * share` on.

    A program works on the same elements of every rank's share in all phases, so that it depends only on the programs with its
    index. STAGED: copy x to `data_at`; else it is there.
    """
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    first, column = program * BLOCK, tl.arange(0, BLOCK)
    peer_buffers, own_buffer = peer_addresses(table, SIZE), tl.load(table + rank)
    peer_flags, own_flags, status, timeout_ns = barrier_addresses(table, flags_at, rank, SIZE)
    pdl_wait(DEPENDENT)
    epoch = tl.load(counters + program) + 2
    if STAGED and PHASES & 1:
        staging = as_pointer(own_buffer + data_at, x)
        for other in range(SIZE):
            for start in range(first, share, step):
                element = other * share + start + column
                mask = (start + column < share) & (element < num)
                tl.store(staging + element, tl.load(x + element, mask=mask), mask=mask)
    if PHASES & 2:  # noqa: SIM102 (PHASES is a constexpr)
        if first < share:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch - 1, SIZE)
    if PHASES & 4:
        sums = as_pointer(own_buffer + sums_at, x)
        for start in range(first, share, step):
            element = rank * share + start + column
            mask = (start + column < share) & (element < num)
            total = sum_of_ranks(peer_buffers, data_at, element, mask, x, SIZE)
            tl.store(sums + start + column, total.to(x.dtype.element_ty), mask=mask)
    if PHASES & 2:  # noqa: SIM102 (PHASES is a constexpr)
        if first < share:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch, SIZE)
    if PHASES & 8:
        for rank_shift in range(SIZE):
            other = (rank + rank_shift) % SIZE  # spreads the ranks' reads over all ranks
            sums = as_pointer(tl.load(table + other) + sums_at, x)
            for start in range(first, share, step):
                element = other * share + start + column
                mask = (start + column < share) & (element < num)
                tl.store(out + element, tl.load(sums + start + column, mask=mask), mask=mask)
        tl.store(counters + program, epoch)


def launch_one_shot(
    workspace: SymmetricWorkspace, x: Tensor, out: Tensor, location: OperandLocation, phases: int = ALL_PHASES
) -> None:
    """out = the sum of x over ranks; x and out contiguous, of one dtype, in multiples of 16 bytes; `location`: see
    `SymmetricWorkspace`."""
    num, channel = x.numel(), location.channel
    dependent = not channel and supports_pdl(x.device)  # large operands gain little
    programs = PROGRAMS.data if channel else PROGRAMS.slots
    block = 512 if num <= 512 * programs else 4096  # only two kernels are compiled for all sizes
    one_shot_kernel[(programs,)](
        x, out, workspace.table, workspace.counters[channel], num, workspace.rank, workspace.layout.flags(channel),
        location.at, location.other_at,
        SIZE=workspace.layout.size, BLOCK=block, STAGED=location.staged, NUM_BARRIERS=channel + 1, PHASES=phases,
        DEPENDENT=dependent,
        num_warps=max(1, min(16, block // 256)), **pdl_options(dependent),
    )  # fmt: skip


def launch_gather(workspace: SymmetricWorkspace, x: Tensor, out: Tensor, inner: int, phases: int = ALL_PHASES) -> None:
    """out [outer, size, inner] = x [outer, inner] of every rank; int32, contiguous, `inner` a multiple of 4."""
    num, location = x.numel(), workspace.locate_operand(x)
    channel = location.channel
    dependent = not channel and supports_pdl(x.device)
    programs = PROGRAMS.data if channel else PROGRAMS.slots
    block = 256 if num <= 256 * programs else 2048
    gather_kernel[(programs,)](
        x, out, workspace.table, workspace.counters[channel], num, inner, workspace.rank, workspace.layout.flags(channel),
        location.at, location.other_at,
        SIZE=workspace.layout.size, BLOCK=block, NUM_BARRIERS=channel + 1, PHASES=phases, DEPENDENT=dependent,
        num_warps=max(1, min(16, block // 128)), **pdl_options(dependent),
    )  # fmt: skip


def launch_two_shot(
    workspace: SymmetricWorkspace, x: Tensor, out: Tensor, location: OperandLocation, phases: int = ALL_PHASES
) -> None:
    """out = the sum of x over ranks; operands as in `launch_one_shot`."""
    num, dependent, layout = x.numel(), supports_pdl(x.device), workspace.layout
    share = cdiv(cdiv(num, layout.size), 8) * 8
    two_shot_kernel[(PROGRAMS.data,)](
        x, out, workspace.table, workspace.counters[1], num, share, workspace.rank, layout.flags(1), location.at, layout.sums,
        SIZE=layout.size, BLOCK=4096, STAGED=location.staged, PHASES=phases, DEPENDENT=dependent,
        num_warps=16, **pdl_options(dependent),
    )  # fmt: skip
