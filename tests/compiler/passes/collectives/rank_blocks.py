"""A block of five linears, three of them row-parallel: one rank's part of it, and the whole on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweave.ops.quant.fp8 import PER_TOKEN, quantize

ops = torch.ops.torchweave
EPS = 1e-5
D, I = 64, 128  # noqa: E741
ROWS = (0, 2, 4)
"""Indices of the row-parallel linears, whose results are all-reduced."""


def weights(d: int = D, i: int = I) -> list[Tensor]:
    """Five weights, alternately [D, I] and [I, D], and three norms; float64."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(d, i) if index in ROWS else (i, d) for index in range(5)]
    linears = [torch.randn(shape, generator=draw, dtype=torch.float64) / shape[1] ** 0.5 for shape in shapes]
    return [*linears, *(torch.rand(d, generator=draw, dtype=torch.float64) + 0.5 for _ in range(3))]


def inputs(tokens: int, d: int = D, i: int = I) -> tuple[Tensor, Tensor]:
    """x [T, I] and the residual [T, D]; float64."""
    draw = torch.Generator().manual_seed(1 + tokens)
    x, residual = (torch.randn(tokens, width, generator=draw, dtype=torch.float64) for width in (i, d))
    return x, residual


def part(x: Tensor, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """A rank's columns of x."""
    return x.chunk(size, 1)[rank].to(dtype).contiguous()


def whole(x: Tensor, residual: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The block on one device, in the dtype of its arguments."""
    for index in range(5):
        x = F.linear(x, given[index])
        if index in ROWS:
            residual = residual + x
            x = F.rms_norm(residual, residual.shape[-1:], given[5 + index // 2], EPS)
    return x, residual


class Block(nn.Module):
    """One rank's part.

    Args:
        quantized: products in FP8; what a norm gives is quantized for the next one.
        reads_sum: the last residual is returned as well.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        dtype: torch.dtype,
        quantized: bool = False,
        reads_sum: bool = False,
        widths: tuple[int, int] = (D, I),
    ) -> None:
        super().__init__()
        *linears, norm_0, norm_1, norm_2 = weights(*widths)
        self.quantized, self.reads_sum, self.dtype = quantized, reads_sum, dtype
        self.parts = [w.chunk(size, 1 if index in ROWS else 0)[rank].to(dtype) for index, w in enumerate(linears)]
        for index, each in enumerate(self.parts):
            w, s = quantize(each, PER_TOKEN) if quantized else (each, torch.ones(1))
            self.register_buffer(f"w{index}", w.contiguous())
            self.register_buffer(f"s{index}", s.flatten())
        for index, norm in enumerate((norm_0, norm_1, norm_2)):
            self.register_buffer(f"n{index}", norm.to(dtype))

    def linear(self, x: Tensor, index: int) -> Tensor:
        w = getattr(self, f"w{index}")
        if not self.quantized:
            return F.linear(x, w)
        q, s = ops.fp8_quant(x, PER_TOKEN)
        return ops.fp8_linear(q, s, w, getattr(self, f"s{index}"), None, self.dtype)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        for index in range(5):
            x = self.linear(x, index)
            if index in ROWS:
                residual = residual + ops.all_reduce(x, "tp")
                x = self.norm(residual, getattr(self, f"n{index // 2}"))
        return (x, residual) if self.reads_sum else (x,)

    def norm(self, h: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm in the form of Llama."""
        wide = h.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(h.dtype)
