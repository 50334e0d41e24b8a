"""Modules that are captured, or nearly, and then cut, shared, fused or recorded badly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

X = {"x": "float32[T,16]"}
NARROW = {"x": "bfloat16[T,16]"}


@torch.library.custom_op("doctor_zoo_boundary::attend", mutates_args=())
def attend(x: Tensor) -> Tensor:
    return x.cumsum(0)


@attend.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("doctor_zoo_boundary::attend_into", mutates_args=("out",))
def attend_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.cumsum(0))


@attend_into.register_fake
def _(x: Tensor, out: Tensor) -> None: ...


class BoundaryWithAnOutput(nn.Module):
    doctor_inputs = X
    doctor_boundary_ops = ("doctor_zoo_boundary::attend",)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.doctor_zoo_boundary.attend(x * 2)  # FIND boundary_output
        return y + 1


class WritesItsBuffer(nn.Module):
    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # FIND mutated_constant
        return x + self.seen


class CopiesToTheHost(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).cpu()  # FIND host_synchronisation
        return y + 1


class MultipliesInFloat(nn.Module):
    doctor_inputs = NARROW

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()  # FIND upcast_matmul
        return (y @ self.weight).to(x.dtype)


class LayersThatDiffer(nn.Module):
    """Each layer has a number of its own in the graph, so that no two pieces are equal."""

    doctor_inputs = X
    doctor_boundary_ops = ("doctor_zoo_boundary::attend_into",)

    def forward(self, x: Tensor) -> Tensor:
        for scale in (2.0, 3.0, 2.0):
            y = x.exp() * scale  # FIND unshared_pieces
            out = torch.empty_like(y)
            torch.ops.doctor_zoo_boundary.attend_into(y, out)
            x = out.sigmoid() - 1
        return x


class LinearsThatDoNotMerge(nn.Module):
    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16, bias=True), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x)  # FIND near_miss
