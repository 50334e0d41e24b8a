"""Symmetric memory of a group of ranks: its layout, operand locations, and the work fused after a sum over ranks.

One allocation on every rank, of the same layout:

    flags       barrier words that programs of other ranks write; two channels, for slots and for `data`
    slots 0-4   operands of one-shot collectives: 0 and 1 staged alternately by the kernel, 2-4 written by the operand's producer
    data        the operand of a large one-shot or of a two-shot collective
    sums        this rank's share of the result of a two-shot collective

A one-shot collective over a slot has one barrier. Its slot may be written again once every rank has *begun* the next
collective, which is certain when that collective has ended here: so consecutive collectives use different slots and need no
second barrier. Large operands have no slots, which would take five times their memory: `data` has a second barrier, after which
no rank reads it. `sums` is written only after the next collective's first barrier, so that one buffer is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Programs(NamedTuple):
    """Programs of a launch: at most one per multiprocessor. With several, some graphs stalled for milliseconds.

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
    """Byte layout of a rank's memory.

    Attributes:
        size: number of ranks.
        slots: the largest operand in a slot, in bytes.
        large: the largest operand, in bytes.
    """

    size: int
    slots: int
    large: int

    def flags(self, channel: int) -> int:
        """Offset of a channel's barrier words: int32 `[programs, size]`."""
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
    """Location of a collective's operand.

    Attributes:
        at: byte offset in each rank's memory.
        other_at: with `staged`, the alternate offset.
        staged: whether the kernel copies the operand there.
        channel: 0: a slot, one barrier; 1: `data`, two barriers.
    """

    at: int
    other_at: int
    staged: bool
    channel: int


@dataclass(frozen=True)
class SymmetricWorkspace:
    """One rank's view of the symmetric memory.

    Attributes:
        rank: this rank.
        layout: the same on all ranks.
        memory: this rank's part, uint8 `[layout.bytes]`.
        table: int64 `[size + 2]` on the device: each rank's address here, that of the status word, and the timeout of a wait in
            nanoseconds.
        counters: int32 `[2, programs]` on the device: barriers so far of each program, by channel.
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
        """Offset of slot `index`, 0 to 2, for an operand that its producer writes."""
        assert 0 <= index < _SLOTS, f"slot {index}: there are {_SLOTS}"
        return self.layout.slot(_STAGES + index)

    def locate_operand(self, x: Tensor) -> OperandLocation:
        """Location of the operand of a one-shot collective: its own, if x is in symmetric memory; else that of the copy."""
        at, layout = self._offset_of(x), self.layout
        if at == layout.data or x.nbytes > layout.slots:
            return self.locate_in_data(x)
        if at in map(self.slot, range(_SLOTS)):
            return OperandLocation(at, at, False, 0)
        return OperandLocation(layout.slot(0), layout.slot(1), True, 0)

    def locate_in_data(self, x: Tensor) -> OperandLocation:
        """Location in `data`, which is, or takes a copy of, x."""
        return OperandLocation(self.layout.data, self.layout.data, self._offset_of(x) != self.layout.data, 1)

    def _offset_of(self, x: Tensor) -> int:
        return x.data_ptr() - self.memory.data_ptr()


@dataclass(frozen=True)
class QuantSpec:
    """Quantization of a norm's output.

    Attributes:
        to: "fp8", by `group` and `scale` of `torchweave::fp8_quant`; "fp4", by `scale` of `torchweave::fp4_quant`.
    """

    to: Literal["fp8", "fp4"]
    group: int = 0
    scale: Tensor | None = None


@dataclass(frozen=True)
class NormSpec:
    """Ops fused after the sum x `[..., D]` over ranks.

    Attributes:
        residual: `[..., D]`, added first; or None.
        weight, eps, offset, wide: as `torchweave::rms_norm`.
        quant: quantization of the norm, if any.
        keep_norm: whether to return the norm.
        keep_sum: whether to return the sum before the norm (without a residual: the reduced x).
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
    """The norm, the sum before it, and the quantized norm with its scales; None for outputs that are not requested."""

    y: Tensor | None
    total: Tensor | None
    q: Tensor | None = None
    s: Tensor | None = None


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
