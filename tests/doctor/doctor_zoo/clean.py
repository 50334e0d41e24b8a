"""Modules in which nothing must be found: what looks like a problem and is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.toy import Toy

X = {"x": "float32[T,16]"}
NARROW = {"x": "bfloat16[T,16]"}
STEP = {"input_ids": "int64[T]<96", "positions": "arange[T]", "logits_index": "int64[N]<T"}


class FeedForward(nn.Module):
    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Hooked(nn.Module):
    """A hook of the module that is examined, at which Dynamo begins once more."""

    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_forward_hook(lambda module, given, found: found * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class NormInFloat(nn.Module):
    """Computing a norm in float32 is right; only products need not be."""

    doctor_inputs = NARROW

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class SizeArithmetic(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        return x.view(tokens * 2, 8).reshape(tokens, 16) + torch.arange(tokens)[:, None] / tokens


class MasksInsteadOfBranches(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(x.sum() > 4, x / 2, x)
        return y.masked_fill(x < 0, 0.0)


class PlainObject(nn.Module):
    """An object's method that only reads its own numbers is traced as it is."""

    doctor_inputs = X

    class Mapping:
        def __init__(self) -> None:
            self.pp_size = 1

        def has_pp(self) -> bool:
            return self.pp_size > 1

    def __init__(self) -> None:
        super().__init__()
        self.mapping = self.Mapping()

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.mapping.has_pp() else x + 1


class LayerLoop(nn.Module):
    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(34))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class LayersByNumber(nn.Module):
    """As many layers as would count as an unrolled loop, called by their numbers and in a comprehension."""

    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(34)])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(34):
            x = x + self.layers[i](x)
        return x + sum(layer(x) * 2 for layer in self.layers)


class Draws(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class HonestOp(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo_numbers.scale_sym(x, x.shape[0]) + 1


class PowerOfTwoByShifts(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : max(4, 8)] * min(2.0, 3.0)


class Decoder(Toy):
    doctor_inputs = STEP
    doctor_boundary_ops = ("toy::attention",)

    def __init__(self) -> None:
        super().__init__(layers=1, hidden=16)


def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.doctor_inputs = X  # type: ignore[attr-defined]


class Branches(nn.Module):
    """A higher-order operator, which the watch on operations lets by."""

    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
