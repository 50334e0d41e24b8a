"""FP8 activations: `torchweave::fp8_quant` and `torchweave::fp8_quant_static`, and the arithmetic that every fused form repeats.

A number is stored as float8_e4m3fn `q` with a float32 scale `s`, and stands for `q * s`:

    s = max(amax, TINY) / 448              over a token, or over 128 channels of a token; or given (static)
    q = e4m3(clamp(x / s, -448, 448))      divided in float32, rounded once to nearest even; saturates, NaN stays NaN

Scales come in three layouts, which `torchweave::fp8_linear` tells apart: static `[1]`; per token `[T, 1]`; per group `[G, T]`, G =
ceil(K / 128), which is what cuBLAS reads and a decode step does not mind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchweave.ops.registry import define

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite number of e4m3fn."""
TINY = 1e-10
"""Least amax: a token of zeros (a padded one) has a scale too."""
GROUP = 128
"""Channels of an activation that share a scale, and side of a weight's block, in the block-wise scheme."""
PER_TOKEN = 0
"""`group` of one scale a token."""
MAX_WIDTH = 32768
"""Widest token that the kernels hold in registers; wider ones take the reference."""


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x over a scale that broadcasts, rounded to e4m3."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def scale_of(amax: Tensor) -> Tensor:
    """The scale under which the largest number becomes 448."""
    return amax.float().clamp(min=TINY) / FP8_MAX


def num_groups(width: int) -> int:
    """Scales of a token in the block-wise scheme."""
    return -(-width // GROUP)


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The dynamic scheme written in torch: x `[..., K]` -> q `[..., K]`, s as `fp8_quant`. The oracle of every kernel."""
    width = x.shape[-1]
    rows = x.reshape(-1, width).float()
    if group == PER_TOKEN:
        scale = scale_of(rows.abs().amax(1, keepdim=True))
        return to_fp8(rows, scale).view(x.shape), scale
    groups = torch.nn.functional.pad(rows, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    scale = scale_of(groups.abs().amax(2))
    q = to_fp8(groups, scale[:, :, None]).flatten(1)[:, :width]
    return q.contiguous().view(x.shape), scale.t().contiguous()


def like_quantized(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Empty results of quantising something of x's shape."""
    width = x.shape[-1]
    tokens = x.numel() // width
    shape = (tokens, 1) if group == PER_TOKEN else (num_groups(width), tokens)
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(shape, dtype=torch.float32)


def runs_here(x: Tensor) -> bool:
    """Whether the kernels can take x: on a GPU, rows contiguous, not too wide."""
    return x.device.type == "cuda" and x.is_contiguous() and x.shape[-1] <= MAX_WIDTH and x.numel() > 0


def check_group(group: int) -> None:
    """ValueError unless `group` is one of the two schemes."""
    if group not in (PER_TOKEN, GROUP):
        raise ValueError(f"group is {group}: expected 0 (a scale for each token) or {GROUP}.")


@define("torchweave::fp8_quant", fake=like_quantized)
def fp8_quant(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise dynamically: x `[..., K]` -> q e4m3 `[..., K]` and s float32 `[T, 1]` (group 0) or `[ceil(K / 128), T]` (128)."""
    check_group(group)
    if not runs_here(x):
        return quantize(x, group)
    from torchweave.ops.kernels.fp8_quant import launch_quant

    q, scale = like_quantized(x, group)
    launch_quant(x, q, scale, group)
    return q, scale


@define("torchweave::fp8_quant_static", fake=lambda x, scale: x.new_empty(x.shape, dtype=FP8))
def fp8_quant_static(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise with a scale that was measured beforehand: x `[..., K]`, scale float32 `[1]` -> q e4m3 `[..., K]`."""
    if not runs_here(x):
        return to_fp8(x, scale).contiguous()
    from torchweave.ops.kernels.fp8_quant import launch_quant

    q = x.new_empty(x.shape, dtype=FP8)
    launch_quant(x, q, scale, None)
    return q


Quantizer = Callable[[Tensor, int], tuple[Tensor, Tensor]]
