"""Triton: gated activations that leave FP8 with a scale for each token, by several programs a token.

Such a scale needs the whole token first. Where tokens are few and wide, a program for each leaves the GPU idle while one
processor works through 14,336 exponentials and divisions; so one kernel activates parts of tokens and notes the largest number of
each, and a second one divides.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.activation import activate
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.quant.formats import empty_quantized
from torchweave.ops.kernels.quant.fp8_quant import num_warps_for, scale_and_store_fp8, scale_fp8, use_pdl
from torchweave.ops.kernels.rows import strided_rows

MAX_TOKENS = 64
"""With more tokens there are programs enough, and what passes between the two kernels costs more."""
MIN_WIDTH = 8192
_ROWS = 8  # groups of 128 channels in a part


@triton.jit
def gated_part_kernel(
    gate_up, active, largest, parts, inner, outer_stride, inner_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a part of `active [T, WIDTH]` = `act(gate) * up`, and its largest size in `largest [T, parts]`."""
    column = tl.program_id(1) * (ROWS * 128) + tl.arange(0, ROWS * 128)
    inside = column < WIDTH
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = gate_up + row // inner * outer_stride + row % inner * inner_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + WIDTH, mask=inside, other=0.0)
    acted = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    result = (acted.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(active + row * WIDTH + column, result, mask=inside)
    size = tl.max(tl.where(inside, tl.abs(result.to(tl.float32)), 0.0), 0)
    tl.store(largest + row * parts + tl.program_id(1), size)


@triton.jit
def quant_part_kernel(
    active, largest, q, s, parts,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a part of q [T, WIDTH] = `active` over its token's scale, which the first program writes to s [T]."""
    column = tl.program_id(1) * (ROWS * 128) + tl.arange(0, ROWS * 128)
    inside, part = column < WIDTH, tl.arange(0, PARTS)
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    one = scale_fp8(tl.max(tl.load(largest + row * parts + part, mask=part < parts, other=0.0), 0))
    tl.store(s + row, one, mask=tl.program_id(1) == 0)
    values = tl.load(active + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scale_and_store_fp8(values, one, inside, q + row * WIDTH + column)


def prefers_two_kernels(gate_up: Tensor, group: int, scale: Tensor | None) -> bool:
    """Whether `launch_gated_parts` is the faster one of the two ways."""
    width = gate_up.shape[-1] // 2
    return group == 0 and scale is None and width >= MIN_WIDTH and gate_up.numel() <= MAX_TOKENS * gate_up.shape[-1]


def launch_gated_parts(gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As `gated_activation_fp8` with a scale for each token; gate_up is not empty."""
    rows, width = strided_rows(gate_up), gate_up.shape[-1] // 2
    q, s = empty_quantized(gate_up, width, 0, None)
    parts, dependent = triton.cdiv(width, _ROWS * 128), use_pdl(gate_up)
    active = torch.empty(rows.count, width, dtype=gate_up.dtype, device=gate_up.device)
    largest = torch.empty(rows.count, parts, dtype=torch.float32, device=gate_up.device)
    how = {
        "WIDTH": width,
        "ROWS": _ROWS,
        "DEPENDENT": dependent,
        "num_warps": num_warps_for(_ROWS),
        **pdl_options(dependent),
    }
    gated_part_kernel[(rows.count, parts)](
        rows.tensor, active, largest, parts, rows.inner, rows.outer_stride, rows.inner_stride,
        ACTIVATION=activation, enable_fp_fusion=False, **how,
    )  # fmt: skip
    quant_part_kernel[(rows.count, parts)](active, largest, q, s, parts, PARTS=triton.next_power_of_2(parts), **how)
    return q, s
