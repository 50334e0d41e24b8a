"""What Dynamo cannot put into a graph."""

from __future__ import annotations

import datetime
import threading
import zlib

import torch
from torch import Tensor, nn

X = {"x": "float32[T,16]"}
IDS = {"ids": "int64[T]<9"}
FOUR_IDS = {"ids": "int64[4]<9"}
WITH_LENGTHS = {"x": "float32[T,16]", "lengths": "int64[T]<5"}


class Print(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        print("shape", y.shape)  # FIND print
        return y + 1


class PrintInALoop(nn.Module):
    """Dynamo gives up the whole frame here; what stands behind the loop is found all the same."""

    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        for step in range(2):
            print(step)  # FIND print
            x = x + 1
        scale = x.sum().item()  # FIND item
        print(scale)  # FIND print
        return x


class NativeCall(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        salt = zlib.crc32(b"salt")  # FIND native_call
        return x * (salt % 7)


class Nonzero(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0)  # FIND data_dependent_shape
        return x + rows.shape[0]


class BooleanIndex(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y[x > 0].sum()  # FIND data_dependent_shape


class Unique(nn.Module):
    doctor_inputs = IDS

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.unique(ids)  # FIND data_dependent_shape
        return found.sum()


class Item(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().max().item()  # FIND item
        return torch.full_like(x, 2.0) if largest else x  # FIND data_dependent_size


class FloatOfATensor(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.max())  # FIND item
        del scale
        return x * 2


class ToList(nn.Module):
    doctor_inputs = FOUR_IDS

    def forward(self, ids: Tensor) -> Tensor:
        names = ids.float().tolist()  # FIND tolist
        return ids * len(names)


class Mapping:
    def __init__(self) -> None:
        self.lock, self.size = threading.Lock(), 2

    def has_pp(self) -> bool:
        with self.lock:
            return self.size > 1


class ObjectMethod(nn.Module):
    doctor_inputs = X

    def __init__(self) -> None:
        super().__init__()
        self.mapping = Mapping()

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        if self.mapping.has_pp():  # FIND custom_object
            y = y * 2
        return y


class NativeMethod(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        now = datetime.datetime.now()  # FIND custom_object (torch 2.11: native_call)
        return x + (now.year > 2000)


class BranchOnData(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        y = x**2
        if torch.sum(x) >= 4:  # FIND data_dependent_control
            y = y / 2
        return y + 10


class WhileOnData(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        while x.abs().sum() > 100:  # FIND data_dependent_control
            x = x / 2
        return x


class SliceByData(nn.Module):
    doctor_inputs = WITH_LENGTHS

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())  # FIND item
        return x[:, : longest + 2] * 2  # FIND data_dependent_size


class Several(nn.Module):
    """Four problems in two functions, all of them found."""

    doctor_inputs = X

    def count(self, x: Tensor) -> Tensor:
        return torch.nonzero(x).sum()  # FIND data_dependent_shape

    def forward(self, x: Tensor) -> Tensor:
        print("start")  # FIND print
        y = x * self.count(x)
        if y.sum() > 0:  # FIND data_dependent_control
            y = y + 1
        zlib.crc32(b"y")  # FIND native_call
        return y * 2


class RowsOfAnExpert(nn.Module):
    doctor_inputs = X

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.where(x[:, 0] > 0)[0]  # FIND data_dependent_shape
        out = torch.zeros_like(x)
        out[rows] = x[rows] * 2
        return out
