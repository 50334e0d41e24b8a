"""Operands of the fused elementwise ops, shared by their tests on a CPU, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

DIALECTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("olmo", {"wide": True}),
    ("gemma", {"offset": 1.0, "wide": True}),
)


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def heads_of(product: Tensor, *heads: int) -> Iterator[Tensor]:
    """Views `[T, heads, D]` of a merged product `[T, sum(heads) * D]`, as the merging of q, k and v leaves them."""
    dim = product.shape[-1] // sum(heads)
    for part in product.split([count * dim for count in heads], -1):
        yield part.unflatten(-1, (-1, dim))


def norm64(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, wide: bool = False) -> Tensor:
    """The norm in float64, nothing rounded."""
    y = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * (weight.double() + offset)


def rope64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in float64."""
    width = cos.shape[-1]
    low, high = x[..., : width // 2].double(), x[..., width // 2 : width].double()
    cos, sin = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    turned = torch.cat((low, high), -1) * cos + torch.cat((-high, low), -1) * sin
    return torch.cat((turned, x[..., width:].double()), -1)


def angles(tokens: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    steps = torch.arange(3, 3 + tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, width // 2)
    both = torch.cat((steps, steps), -1)
    return both.cos().to(device, dtype), both.sin().to(device, dtype)
