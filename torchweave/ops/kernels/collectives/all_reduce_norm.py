"""Triton: the sum over ranks, the residual add, the RMSNorm and quantising, in one launch, a token by a program.

See `symmetric_reduce` for PHASES, MEETINGS and counters. Rounding is that of the parts, one after the other.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.collectives.all_reduce import sum_of_ranks
from torchweave.ops.kernels.collectives.barrier import as_pointer, barrier_addresses, peer_addresses, rank_barrier
from torchweave.ops.kernels.collectives.workspace import (
    ALL_PHASES,
    PROGRAMS,
    NormOutput,
    NormSpec,
    OperandLocation,
    SymmetricWorkspace,
)
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.norm import scale_rows
from torchweave.ops.kernels.quant.fp8_quant import num_warps_for, padded_groups, quant_scheme, store_fp8
from torchweave.ops.kernels.quant.nvfp4_quant import store_fp4

FP4_SCHEME = 3
"""SCHEME beside those of `fp8_quant`; -1 is none."""


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def one_shot_norm_kernel(
    x, residual, weight, y, total, q, s, static_scale, table, counters,
    num_tokens, eps, offset, rank, flags_at, data_at, other_at,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, WIDE: tl.constexpr,
    KEEP_NORM: tl.constexpr, KEEP_SUM: tl.constexpr, SCHEME: tl.constexpr,
    STAGED: tl.constexpr, NUM_BARRIERS: tl.constexpr, PHASES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Token t of y, total, q and s from x [num_tokens, WIDTH] of all ranks, by program t modulo the number of programs."""
    program = tl.program_id(0)
    column = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    dtype = x.dtype.element_ty
    factor = tl.load(weight + column, mask=inside, other=0.0) if WEIGHT else 0.0
    peer_buffers, own_buffer = peer_addresses(table, SIZE), tl.load(table + rank)
    peer_flags, own_flags, status, timeout_ns = barrier_addresses(table, flags_at, rank, SIZE)
    pdl_wait(DEPENDENT)
    epoch = tl.load(counters + program) + NUM_BARRIERS
    at = tl.where(epoch % 2 == 0, data_at, other_at) if STAGED else data_at
    if STAGED and PHASES & 1:
        staging = as_pointer(own_buffer + at, x)
        for start in range(0, num_tokens - program, tl.num_programs(0)):
            element = (program + start) * WIDTH + column
            tl.store(staging + element, tl.load(x + element, mask=inside), mask=inside)
    if PHASES & 2:  # noqa: SIM102 (one is known when this is built)
        if program < num_tokens:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch - NUM_BARRIERS + 1, SIZE)
    if PHASES & 4:
        for start in range(0, num_tokens - program, tl.num_programs(0)):
            token = program + start
            element = token * WIDTH + column
            value = sum_of_ranks(peer_buffers, at, element, inside, x, SIZE).to(dtype)
            if ADD:
                other = tl.load(residual + element, mask=inside, other=0.0)
                value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
            if KEEP_SUM:
                tl.store(total + element, value, mask=inside)
            wide = value.to(tl.float32)
            norm = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / WIDTH + eps)
            result = scale_rows(wide, norm, factor, offset, WEIGHT, WIDE, dtype)
            if KEEP_NORM:
                tl.store(y + element, result.to(dtype), mask=inside)
            if SCHEME == 3:
                store_fp4(result, 0, q, s, static_scale, token, WIDTH, ROWS)
            elif SCHEME >= 0:
                store_fp8(result, inside, column, 0, q, s, static_scale, token, num_tokens, WIDTH, SCHEME, ROWS)
        tl.store(counters + program, epoch)
    if NUM_BARRIERS == 2 and PHASES & 2:  # noqa: SIM102 (one is known when this is built)
        if program < num_tokens:
            rank_barrier(peer_flags, own_flags, status, timeout_ns, epoch, SIZE)


def launch_one_shot_norm(
    workspace: SymmetricWorkspace,
    x: Tensor,
    norm: NormSpec,
    out: NormOutput,
    location: OperandLocation,
    phases: int = ALL_PHASES,
) -> None:
    """`out` = what `norm` makes of the sum of x [..., D] over ranks; all contiguous, D a multiple of 8."""
    width, channel = x.shape[-1], location.channel
    dependent = not channel and supports_pdl(x.device)  # large ones have little to gain
    whole, quant = padded_groups(width), norm.quant
    scheme = -1 if quant is None else FP4_SCHEME if quant.to == "fp4" else quant_scheme(quant.group, quant.scale)
    static_scale = quant.scale if quant is not None and quant.scale is not None else x
    one_shot_norm_kernel[(PROGRAMS.data if channel else PROGRAMS.slots,)](
        x, _or(norm.residual, x), _or(norm.weight, x), _or(out.y, x), _or(out.total, x), _or(out.q, x), _or(out.s, x), static_scale,
        workspace.table, workspace.counters[channel], x.numel() // width, norm.eps, norm.offset, workspace.rank,
        workspace.layout.flags(channel), location.at, location.other_at,
        WIDTH=width, ROWS=whole, SIZE=workspace.layout.size,
        ADD=norm.residual is not None, WEIGHT=norm.weight is not None, WIDE=norm.wide,
        KEEP_NORM=out.y is not None, KEEP_SUM=out.total is not None, SCHEME=scheme,
        STAGED=location.staged, NUM_BARRIERS=channel + 1, PHASES=phases, DEPENDENT=dependent,
        num_warps=num_warps_for(whole), enable_fp_fusion=False, **pdl_options(dependent),
    )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
