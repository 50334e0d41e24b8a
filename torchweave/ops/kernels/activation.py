"""Triton: `act(gate) * up`, over rows of one tensor or of two."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.rows import strided_rows
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a float32 tile, in float32."""
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif (
        ACTIVATION == "gelu_tanh"
    ):  # 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2 * u)), which does not cancel for negative x
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        result = x / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == "relu":
        result = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "sigmoid")
        result = 1.0 / (1.0 + tl.exp(-x))
    return result


@triton.jit
def gated_kernel(
    gate, up, out, gate_inner, gate_outer_stride, gate_inner_stride, up_inner, up_outer_stride, up_inner_stride,
    width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One block of columns of one row of out [rows, width]; gate and up are `StridedRows`."""
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_at = row // gate_inner * gate_outer_stride + row % gate_inner * gate_inner_stride
    up_at = row // up_inner * up_outer_stride + row % up_inner * up_inner_stride
    value = tl.load(gate + gate_at + column, mask=mask, other=0.0)
    other = tl.load(up + up_at + column, mask=mask, other=0.0)
    active = activate(value.to(tl.float32), ACTIVATION).to(value.dtype)
    result = active.to(tl.float32) * other.to(tl.float32)
    tl.store(out + row * width + column, result.to(value.dtype), mask=mask)


def launch_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up` as a contiguous tensor."""
    first, second = strided_rows(gate), strided_rows(up)
    width, dependent = gate.shape[-1], supports_pdl(gate.device)
    block = min(1024, next_power_of_2(width))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    gated_kernel[(first.count, cdiv(width, block))](
        first.tensor, second.tensor, out, first.inner, first.outer_stride, first.inner_stride,
        second.inner, second.outer_stride, second.inner_stride, width,
        ACTIVATION=activation, BLOCK=block, DEPENDENT=dependent, num_warps=4, enable_fp_fusion=False, **pdl_options(dependent),
    )  # fmt: skip
    return out
