"""What makes one capture hold for some calls only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

X = {"x": "float32[T,16]"}
WITH_NUMBER = {"x": "float32[T,16]", "n": "int"}
WITH_NUMBERS = {"x": "float32[T,16]", "sizes": "ints"}
_library = torch.library.Library("doctor_zoo_numbers", "FRAGMENT")
_library.define("scale(Tensor x, int n) -> Tensor")
_library.define("scale_sym(Tensor x, SymInt n) -> Tensor")
for _name in ("scale", "scale_sym"):
    _library.impl(_name, lambda x, n: x * n, "CPU")
    torch.library.register_fake(f"doctor_zoo_numbers::{_name}", lambda x, n: torch.empty_like(x), lib=_library)


class BitLength(nn.Module):
    doctor_inputs = WITH_NUMBER

    def forward(self, x: Tensor, n: int) -> Tensor:
        power = 1 << (n - 1).bit_length()  # FIND bit_length
        return x * power


class BitLengthOfASize(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return y * x.shape[0].bit_length()  # FIND bit_length


class MinOfAList(nn.Module):
    doctor_inputs = WITH_NUMBERS

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        y = x * 2
        return y + min(sizes)  # FIND min_max_of_list


class MaxOfAList(nn.Module):
    doctor_inputs = WITH_NUMBERS

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x + max(sizes)  # FIND min_max_of_list


class BranchOnASize(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 20:  # FIND size_branch
            return x * 2
        return x * 3


class BranchOnOne(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:  # FIND zero_one
            return x * 2
        return x * 3


class ChangingNumber(nn.Module):
    doctor_inputs = WITH_NUMBER

    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * n  # FIND changing_number


class ChangingAttribute(nn.Module):
    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1  # FIND changing_attribute
        return x * self.step


class OpTakesInt(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return torch.ops.doctor_zoo_numbers.scale(y, x.shape[0])  # FIND op_takes_int


class ShortLoopOverASize(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(x.shape[0] // 16):  # FIND dynamic_loop
            y = y + 1
        return y


class TwoBranches(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 if x.shape[0] > 32 else x  # FIND size_branch
        return y + 1 if x.shape[0] < 3 else y  # FIND size_branch


def scaled_where_long(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 20 else x  # a size_branch


class BranchOnEven(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x + 1  # FIND size_branch


class LoopOverRows(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])  # FIND fixed_size
