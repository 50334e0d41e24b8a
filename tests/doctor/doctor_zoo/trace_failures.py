"""Ops without an honest fake kernel, loops that unroll, and lines that do not hold for every size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

X = {"x": "float32[T,16]"}
_library = torch.library.Library("doctor_zoo", "FRAGMENT")


def _op(name: str, fake: object, real: object, schema: str = "(Tensor x) -> Tensor") -> None:
    _library.define(name + schema)
    _library.impl(name, real, "CPU")
    if fake is not None:
        torch.library.register_fake(f"doctor_zoo::{name}", fake, lib=_library)


_op("no_fake", None, lambda x: x * 2)
_op("wrong_shape", lambda x: torch.empty_like(x), lambda x: torch.cat((x, x)))
_op("wrong_dtype", lambda x: torch.empty_like(x), lambda x: x.double())
_op("wrong_stride", lambda x: torch.empty_like(x), lambda x: x.t().contiguous().t() * 1.0)
_op("fixed_size", lambda x: x.new_empty(64, 16), lambda x: x * 2)
_op("writes", lambda x: torch.empty_like(x), lambda x: x.add_(1) * 2)
_op("returns_a_view", lambda x: torch.empty_like(x), lambda x: x.view(-1, 16))


class MissingFake(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.doctor_zoo.no_fake(x)  # FIND missing_fake_kernel
        return y + 1


class WrongShape(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo.wrong_shape(x)  # FIND wrong_fake_kernel


class WrongDtype(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo.wrong_dtype(x).float()  # FIND wrong_fake_kernel


class WrongStride(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo.wrong_stride(x) + 1  # FIND wrong_fake_kernel


class RightAtOneSizeOnly(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo.fixed_size(x) + 1  # FIND wrong_fake_kernel


class UndeclaredMutation(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo.writes(x)  # FIND undeclared_mutation


class UndeclaredAlias(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.doctor_zoo.returns_a_view(x) + 1  # FIND undeclared_alias


class LongLoop(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        for step in range(40):  # FIND unrolled_loop
            x = x * 0.5 + step
        return x


class LoopInAHelper(nn.Module):
    doctor_inputs = X

    def mix(self, x: Tensor) -> Tensor:
        return (x + x.flip(-1)) / 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(33):  # FIND unrolled_loop
            x = self.mix(x)
        return x


class LoopOverTokens(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        total = x[0]
        for token in range(x.shape[0]):  # FIND unrolled_loop
            total = total + x[token] * token
        return total


class NotForEverySize(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        # No exception that is handled: from torch 2.14 on Dynamo traces the handler of an op's exception.
        if torch.compiler.is_compiling():
            return x.view(-1, 7)  # FIND fake_run
        return x


class TwoBadOps(nn.Module):
    """Behind an op that cannot be traced, the next one is found too."""

    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.doctor_zoo.no_fake(x)  # FIND missing_fake_kernel
        z = torch.ops.doctor_zoo.wrong_dtype(y).float()  # FIND wrong_fake_kernel
        print("then")  # FIND print
        return y + z


class GeneratorOverNumbers(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x * i for i in range(40)]).sum(0)  # FIND unrolled_loop


class Transformed(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.sum())(x)  # FIND refused
