"""Operands of `torchweave::int_linear` with their values in float64, shared by tests on a CPU, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchweave.ops.quant.fp8 import FP8
from torchweave.ops.quant.int_linear import num_groups, pack_int4

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
"""Values of e2m1 codes."""


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


@dataclass(frozen=True)
class Fp4Operands:
    """Arguments of the op with a weight of e2m1 numbers, and the weight's values in float64."""

    x: Tensor
    w: Tensor
    scale: Tensor
    row_scale: Tensor | None
    bias: Tensor | None
    values: Tensor

    @property
    def group(self) -> int:
        return 32 if self.scale.dtype == torch.uint8 else 16

    @property
    def weight(self) -> tuple[Tensor, Tensor, None, None]:
        return self.w, self.scale, None, None

    @property
    def arguments(self) -> tuple:
        """Those of the op."""
        return self.x, self.w, self.scale, None, None, self.bias, self.group, self.row_scale

    def expected(self) -> Tensor:
        return self.x.double() @ self.values.t() + (0 if self.bias is None else self.bias.double())


def fp4_operands(
    kind: str, tokens: int, outputs: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu", bias: bool = False
) -> Fp4Operands:  # fmt: skip
    """kind: mxfp4 or nvfp4."""
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(0, 16, (outputs, width), dtype=torch.uint8, generator=generator)
    row_scale = None
    if kind == "mxfp4":
        scale = torch.randint(118, 124, (outputs, width // 32), dtype=torch.uint8, generator=generator)
        by = torch.exp2(scale.double() - 127)
    else:
        scale = (torch.rand(outputs, width // 16, generator=generator) * 4 + 0.5).to(FP8)
        row_scale = torch.rand(outputs, generator=generator) * 0.02 + 0.01
        by = scale.double() * row_scale.double()[:, None]
    values = CODES[codes.long()] * by.repeat_interleave(width // scale.shape[1], 1)
    added = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    tensors = (
        None if each is None else each.to(device) for each in (x, pack_int4(codes), scale, row_scale, added, values)
    )
    return Fp4Operands(*tensors)  # type: ignore[arg-type]


def mxfp4_values(q: Tensor, s: Tensor) -> Tensor:
    """Float32 `[..., K]` of MXFP4: bytes `[..., K / 2]`, the even channel in the low half, and exponents `[..., K / 32]`."""
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2)
    return (CODES[codes.long()] * torch.exp2(s.double() - 127).repeat_interleave(32, -1)).float()
