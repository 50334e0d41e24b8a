"""Symmetric memory as the kernels read it: layout, operand locations, and the work fused behind a sum over ranks.

One allocation on every rank, of the same layout:

    flags       what programs of other ranks wrote when they came to a meeting; two channels, for slots and for `data`
    slots 0-4   operands of one-shot collectives: 0 and 1 staged in turn by the kernel itself, 2-4 written by whoever made them
    data        the operand of a large one-shot or of a two-shot collective
    sums        this rank's share of what a two-shot collective makes

A one-shot collective over a slot has one meeting. Its slot may be written again once every rank has *begun* the collective after
it, which is known when that one has ended here: so no two collectives that follow each other use the same slot, and then nobody
needs to meet a second time. Large operands have no slots, which would take five times their memory: what is in `data` meets a
second time, after which nobody reads it any more. `sums` is written only after the next one's first meeting. So one place of each
is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Programs(NamedTuple):
    """Programs of a launch: one a multiprocessor at the most. With several, some graphs stood still for milliseconds.

    Attributes:
        slots: of one-shot collectives over slots.
        data: of all collectives over `data`.
    """

    slots: int = 64
    data: int = 128


PROGRAMS = Programs()
ALL_PHASES = 15
_PAGE = 4096
_STAGES, _SLOTS = 2, 3


@dataclass(frozen=True)
class SymmetricLayout:
    """Bytes of a rank's memory.

    Attributes:
        size: number of ranks.
        slots: the largest operand that lies in a slot, in bytes.
        large: the largest of all, in bytes.
    """

    size: int
    slots: int
    large: int

    def flags(self, channel: int) -> int:
        """Where the words of a channel begin: int32 `[programs, size]`."""
        return channel * _pages(max(PROGRAMS) * self.size * 4)

    def slot(self, index: int) -> int:
        return self.flags(2) + index * _pages(self.slots)

    @property
    def data(self) -> int:
        return self.slot(_STAGES + _SLOTS)

    @property
    def sums(self) -> int:
        return self.data + _pages(self.large)

    @property
    def bytes(self) -> int:
        return self.sums + _pages(self.large // self.size + 16 * self.size)


class OperandLocation(NamedTuple):
    """Where a collective reads its operand.

    Attributes:
        at: byte of each rank's memory.
        other_at: with `staged`, the place that takes turns with it.
        staged: whether the kernel copies the operand there itself.
        channel: 0: a slot, one meeting; 1: `data`, two meetings.
    """

    at: int
    other_at: int
    staged: bool
    channel: int


@dataclass(frozen=True)
class SymmetricWorkspace:
    """One rank's view of the memory of all.

    Attributes:
        rank: this one.
        layout: the same on all ranks.
        memory: this rank's part, uint8 `[layout.bytes]`.
        table: int64 `[size + 2]` on the device: each rank's address here, that of the status word, and nanoseconds that a wait may
            take.
        counters: int32 `[2, programs]` on the device: meetings so far of each program, by channel.
    """

    rank: int
    layout: SymmetricLayout
    memory: Tensor
    table: Tensor
    counters: Tensor

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, at: int) -> Tensor:
        """This rank's bytes from `at` on as a tensor."""
        size = math.prod(shape) * dtype.itemsize
        return self.memory[at : at + size].view(dtype).view(*shape)

    def slot(self, index: int) -> int:
        """Where the operand of a one-shot collective lies that its maker wrote into slot `index`, 0 to 2."""
        assert 0 <= index < _SLOTS, f"slot {index}: there are {_SLOTS}"
        return self.layout.slot(_STAGES + index)

    def locate_operand(self, x: Tensor) -> OperandLocation:
        """Where a one-shot collective reads x: where it is, if all ranks see it there; else where it is copied to."""
        at, layout = self._offset_of(x), self.layout
        if at == layout.data or x.nbytes > layout.slots:
            return self.locate_in_data(x)
        if at in map(self.slot, range(_SLOTS)):
            return OperandLocation(at, at, False, 0)
        return OperandLocation(layout.slot(0), layout.slot(1), True, 0)

    def locate_in_data(self, x: Tensor) -> OperandLocation:
        """`data`, where x is or is copied to."""
        return OperandLocation(self.layout.data, self.layout.data, self._offset_of(x) != self.layout.data, 1)

    def _offset_of(self, x: Tensor) -> int:
        return x.data_ptr() - self.memory.data_ptr()


@dataclass(frozen=True)
class QuantSpec:
    """How a norm's output is quantised.

    Attributes:
        to: "fp8", by `group` and `scale` of `torchweave::fp8_quant`; "fp4", by `scale` of `torchweave::fp4_quant`.
    """

    to: Literal["fp8", "fp4"]
    group: int = 0
    scale: Tensor | None = None


@dataclass(frozen=True)
class NormSpec:
    """What is done to a reduced x `[..., D]`.

    Attributes:
        residual: `[..., D]`, added to it first; none: nothing is.
        weight, eps, offset, wide: as `torchweave::rms_norm`.
        quant: how the norm is quantised, if it is.
        keep_norm: whether the norm itself is wanted.
        keep_sum: whether the sum before the norm is wanted (without a residual: the reduced x).
    """

    residual: Tensor | None
    weight: Tensor | None
    eps: float
    offset: float = 0.0
    wide: bool = False
    quant: QuantSpec | None = None
    keep_norm: bool = True
    keep_sum: bool = True


class NormOutput(NamedTuple):
    """The norm, the sum before it, and the quantised norm with its scales; None for what was not asked for."""

    y: Tensor | None
    total: Tensor | None
    q: Tensor | None = None
    s: Tensor | None = None


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
