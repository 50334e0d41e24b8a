"""Triton: a token is read once and leaves as e4m3 numbers and scales. The other kernels that end in FP8 share `store_fp8`.

A token lies in registers as `[ROWS, 128]`, so that a scale over 128 channels is a reduction over one axis.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

STATIC: tl.constexpr = tl.constexpr(0)
TOKEN: tl.constexpr = tl.constexpr(1)
GROUPS: tl.constexpr = tl.constexpr(2)
FP8_MAX: tl.constexpr = tl.constexpr(448.0)
TINY: tl.constexpr = tl.constexpr(1e-10)


@triton.jit
def store_fp8(
    values, inside, column, first_group, q, scale, token, num_tokens,
    WIDTH: tl.constexpr, SCHEME: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round float32 `values [ROWS, 128]`, of which `inside` are real, into row `token` of `q`; write the scale, or read it."""
    if SCHEME == 0:
        divisor = tl.full([ROWS, 1], 1.0, tl.float32) * tl.load(scale)
    else:
        size = tl.max(tl.where(inside, tl.abs(values), 0.0), 1)
        if SCHEME == 1:
            one = tl.div_rn(tl.maximum(tl.max(size, 0), TINY), FP8_MAX)
            tl.store(scale + token, one)
            divisor = tl.full([ROWS, 1], 1.0, tl.float32) * one
        else:
            each = tl.div_rn(tl.maximum(size, TINY), FP8_MAX)
            group = first_group + tl.arange(0, ROWS)
            tl.store(scale + group.to(tl.int64) * num_tokens + token, each, mask=group < (WIDTH + 127) // 128)
            divisor = each[:, None]
    scaled = tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    scaled = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q + token.to(tl.int64) * WIDTH + column, scaled.to(q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def quant_kernel(
    x, q, scale, num_tokens,
    WIDTH: tl.constexpr, SCHEME: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, parts): a program quantises `ROWS * 128` channels of a token, which is all of it when SCHEME is per token."""
    token = tl.program_id(0)
    first_group = tl.program_id(1) * ROWS
    column = (first_group + tl.arange(0, ROWS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + token.to(tl.int64) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    store_fp8(values, inside, column, first_group, q, scale, token, num_tokens, WIDTH, SCHEME, ROWS)


def scheme_of(group: int | None) -> int:
    """The kernels' SCHEME: None is static, 0 per token, else per 128 channels."""
    return 0 if group is None else 1 if group == 0 else 2


def rows_of(width: int) -> int:
    """ROWS of a whole token: its groups, padded to a power of two."""
    return triton.next_power_of_2(triton.cdiv(width, 128))


def warps_of(rows: int) -> int:
    """Warps of a program that holds a whole token: eight numbers a thread where there are threads enough."""
    return min(max(rows // 2, 1), 16)


def launch_quant(x: Tensor, q: Tensor, scale: Tensor, group: int | None, *, dependent: bool = False) -> None:
    """x `[..., K]` contiguous into q `[..., K]`; `scale` is written (`group` 0 or 128) or read (None)."""
    width = x.shape[-1]
    tokens, rows = x.numel() // width, rows_of(width)
    if group != 0:
        rows = min(rows, 8)
    quant_kernel[(tokens, triton.cdiv(triton.cdiv(width, 128), rows))](
        x, q, scale, tokens, WIDTH=width, SCHEME=scheme_of(group), ROWS=rows, DEPENDENT=dependent,
        num_warps=warps_of(rows), **dependent_launch(dependent),
    )  # fmt: skip


def dependent_launch(dependent: bool) -> dict[str, Any]:
    """The launch option of programmatic dependent launch."""
    return {"launch_pdl": True} if dependent else {}
