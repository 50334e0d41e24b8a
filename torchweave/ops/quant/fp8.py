"""FP8 activations: `torchweave::fp8_quant`, and the arithmetic that its fused forms share.

A number is stored as float8_e4m3fn `q` with a float32 scale `s` and has the value `q * s`:

    s = max(amax, TINY) / 448              over a token, or over 128 channels of a token; or given (static)
    q = e4m3(clamp(x / s, -448, 448))      divided in float32, rounded once to nearest even; saturates, NaN stays NaN

Scales have three layouts, which `torchweave::fp8_linear` distinguishes by shape: static `[1]`; per token `[T, 1]`; per group
`[G, T]`, G = ceil(K / 128), the layout of cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.kernels.quant.formats import FP8, FP8_MAX, GROUP, MIN_AMAX, PER_TOKEN, empty_quantized
from torchweave.ops.registry import define


def has_nan(q: Tensor) -> bool:
    """Whether e4m3 numbers, contiguous, have NaN among them: the bytes 0x7f and 0xff, the largest as int8 and as uint8.

    Maxima take 70 ms a GB on a CPU core, which loads a checkpoint in the page cache in 800; a conversion to float32 takes 10 s.
    """
    return bool(q.numel()) and (int(q.view(torch.int8).max()) == 127 or int(q.view(torch.uint8).max()) == 255)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x over a scale that broadcasts, rounded to e4m3."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def scale_from_amax(amax: Tensor) -> Tensor:
    """The scale that maps the largest absolute value to 448."""
    return amax.float().clamp(min=MIN_AMAX) / FP8_MAX


def quantize(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`fp8_quant` in plain torch: x `[..., K]` -> q `[..., K]` and s. The oracle of every kernel."""
    if scale is not None:
        return to_fp8(x, scale).contiguous(), scale.clone()
    width = x.shape[-1]
    rows = x.reshape(-1, width).float()
    if group == PER_TOKEN:
        scale = scale_from_amax(rows.abs().amax(1, keepdim=True))
        return to_fp8(rows, scale).view(x.shape), scale
    groups = torch.nn.functional.pad(rows, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    scale = scale_from_amax(groups.abs().amax(2))
    q = to_fp8(groups, scale[:, :, None]).flatten(1)[:, :width]
    return q.contiguous().view(x.shape), scale.t().contiguous()


def _fake(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return empty_quantized(x, x.shape[-1], group, scale)


def _launch(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.quant.fp8_quant import launch_quant

    return launch_quant(x, group, scale)


@define("torchweave::fp8_quant", fake=_fake, cuda=_launch)
def fp8_quant(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize: x `[..., K]` -> (q e4m3 `[..., K]` contiguous, s float32).

    Args:
        group: 0: a scale for each token, s `[T, 1]`; 128: for each 128 channels of a token, s `[ceil(K / 128), T]`.
        scale: float32 `[1]`, a static scale; group is then 0 and s is a copy of it.
    """
    empty_quantized(x[:0], x.shape[-1], group, scale)
    return quantize(x, group, scale)
