"""Operands of `torchweave::int_linear` with their values in float64, shared by tests on a CPU, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchweave.ops.quant.int_linear import num_groups, pack_int4


@dataclass(frozen=True)
class IntCase:
    bits: int
    group: int
    zero: bool = False
    order: bool = False
    bias: bool = False

    def __str__(self) -> str:
        letters = "".join(name[0] for name in ("zero", "order", "bias") if getattr(self, name))
        return f"int{self.bits}-{self.group or 'channel'}{'-' * bool(letters)}{letters}"


@dataclass(frozen=True)
class Operands:
    """Arguments of the op, the integers and the zero points (in float64) that the weight was made of."""

    x: Tensor
    weight: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    bias: Tensor | None
    group: int
    q: Tensor
    zero: Tensor

    def values(self) -> Tensor:
        """float64 `[N, K]`, columns as the inputs."""
        values, order = weight_values(self), self.weight[3]
        if order is None:
            return values
        placed = torch.empty_like(values)
        placed[:, order.long()] = values
        return placed

    def expected(self) -> Tensor:
        return self.x.double() @ self.values().t() + (0 if self.bias is None else self.bias.double())


def weight_values(made: Operands) -> Tensor:
    """float64 `[N, K]`, columns as in the weight."""
    column = torch.arange(made.q.shape[1], device=made.q.device) // made.group
    return (made.q.double() - made.zero[:, column]) * made.weight[1].double()[:, column]


def operands(
    case: IntCase,
    tokens: int,
    outputs: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    group = case.group or width
    shape = (outputs, num_groups(width, group))
    top = 1 << case.bits
    q = torch.randint(0, top, (outputs, width), dtype=torch.uint8, generator=generator)
    scale = ((torch.rand(shape, generator=generator) + 0.5) / top / width**0.5).to(
        torch.bfloat16 if dtype == torch.float32 else dtype
    )
    zero = torch.randint(0, top, shape, dtype=torch.uint8, generator=generator) if case.zero else None
    order = torch.randperm(width, generator=generator).int() if case.order else None
    bias = torch.randn(outputs, generator=generator).to(dtype) if case.bias else None
    w = pack_int4(q) if case.bits == 4 else (q ^ 128).view(torch.int8)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    middle = torch.full(shape, top / 2, dtype=torch.float64) if zero is None else zero.double()
    weight = tuple(None if each is None else each.to(device) for each in (w, scale, zero, order))
    moved = None if bias is None else bias.to(device)
    return Operands(x.to(device), weight, moved, group, q.to(device), middle.to(device))  # type: ignore[arg-type]
