"""`torchweave::int8_linear`: product of an activation, rounded to 8 bits token by token, and a weight in 8 bits (W8A8).

s = max(amax, TINY) / 127.5             over a token, as compressed-tensors computes it
q = int8(clamp(round(x / s), -128, 127))    nearest, a tie to the even integer
out = (q @ w.T) * s * scale + bias      products summed in integers, exactly; scaled in float32 and rounded once
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchweave.ops.kernels.quant.formats import MIN_AMAX
from torchweave.ops.registry import define

_CHUNK = 1 << 22  # weights that are widened at once on a CPU
MANY_ROWS = 8192
"""From these many rows of a weight on, programs with more of them fill a GPU."""


@dataclass(frozen=True)
class Int8Config:
    """Launch configuration of the product: rows of the weight, tokens and inputs of a program's tiles, warps, pipeline stages."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    stages: int


def choose(num_tokens: int, num_outputs: int) -> Int8Config:
    """Configuration for a number of tokens and of rows of the weight."""
    if num_tokens > 64:
        return Int8Config(128, 128, 128, num_warps=8, stages=3)
    block_t = next(size for size in (16, 32, 64) if num_tokens <= size)
    return Int8Config(64 if num_outputs >= MANY_ROWS else 32, block_t, 256, num_warps=4, stages=4)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[T, K]` -> q int8 `[T, K]`, s float32 `[T]`. The oracle of the kernel."""
    wide = x.float()
    s = wide.abs().amax(1).clamp(min=MIN_AMAX) / 127.5
    return (wide / s[:, None]).round().clamp(-128, 127).to(torch.int8), s


def _fake(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _launch(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from torchweave.ops.kernels.quant.int8_linear import launch

    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((*x.shape[:-1], w.shape[0]))
    if len(rows):
        launch(choose(len(rows), w.shape[0]), rows, w, scale, bias, out.view(-1, w.shape[0]))
    return out


@define("torchweave::int8_linear", fake=_fake, cuda=_launch)
def int8_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., N]` of x's dtype; x is rounded to 8 bits.

    Args:
        x: `[..., K]`.
        w: int8 `[N, K]`.
        scale: a floating-point dtype, `[N, 1]`.
        bias: `[N]` or none.
    """
    q, s = quantize_tokens(x.reshape(-1, x.shape[-1]))
    step = max(1, _CHUNK // max(w.shape[1], 1))
    sums = torch.cat([q.double() @ part.double().t() for part in w.split(step)], 1)  # exact: below 2 ** 53
    out = sums.float() * s[:, None] * scale.float().t()
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], w.shape[0])
