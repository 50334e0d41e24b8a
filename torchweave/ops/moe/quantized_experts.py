"""`torchweave::quantized_experts`: `torchweave::experts` with weights in FP8, or packed: integers, MXFP4, NVFP4.

Activations keep their 16 bits. On a CPU the chosen experts are dequantized one by one. On a GPU "rows" and "tiles" of
`fused_experts` run: the kernels turn numbers of a weight into 16 bits or float32, which is exact, before they multiply them;
scales are applied to sums of at most 128 products in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.kernels.moe.packing import Packing
from torchweave.ops.moe.experts import (
    PACKED_DTYPES,
    ExpertForm,
    ExpertsCall,
    dense_experts,
    fake_sum,
    loop_over_experts,
)
from torchweave.ops.quant.int_linear import kernels_support
from torchweave.ops.registry import define


@define("torchweave::quantized_experts", fake=fake_sum)
def quantized_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    group: int = 0,
    up_zero: Tensor | None = None,
    down_zero: Tensor | None = None,
    up_row_scale: Tensor | None = None,
    down_row_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`sum_j weight[t, j] * expert[index[t, j]](x[t])`: `[T, K]` of x's dtype; the rest is as in `torchweave::experts`.

    Args:
        up, up_scale: FP8: e4m3 `[E, 2 I, K]` and float32 `[E, 2 I, 1]`, or `[E, 2 I / 128, ceil(K / 128)]` by blocks of
            128 x 128, whole ones in each half. Packed: int32 or int8 as `w` of `torchweave::int_linear` for each expert, with its
            `scale`. I rows when not gated.
        down, down_scale: the same of `[E, K, I]`; K / 128 is rounded up.
        group, up_zero, down_zero, up_row_scale, down_row_scale: of packed weights, as `torchweave::int_linear` takes them for each
            expert; group 0: one scale a row.
        residual: as in `torchweave::experts`.
    """
    form = ExpertForm(activation, gated, interleaved, False, alpha, limit)
    out = x.new_empty(x.shape)
    packings = (Packing(up_zero, up_row_scale, group), Packing(down_zero, down_row_scale, group))
    scales = (up_scale, down_scale)
    call = ExpertsCall(x, index, weight, up, down, up_bias, down_bias, out, form, *scales, *packings, residual=residual)
    if not x.is_cuda:
        loop_over_experts(call)
    elif _has_kernels(call):
        from torchweave.ops.moe.fused_experts import run

        run(call)
    else:
        dense_experts(call)
    return out


def _has_kernels(call: ExpertsCall) -> bool:
    """Whether the kernels multiply by these weights on a GPU."""
    if call.up.dtype not in PACKED_DTYPES:
        return call.x.dtype in (torch.bfloat16, torch.float16)
    assert call.up_scale is not None
    return all(
        kernels_support(width, call.up_packing.group or width, call.x.dtype, call.up_scale.dtype)
        for width in (call.x.shape[1], call.inner)
    )
