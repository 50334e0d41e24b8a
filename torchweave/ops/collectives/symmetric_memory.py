"""Memory that all ranks of a group see, as the kernels over it use it: its layout, and which kernel runs for what size.

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
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec, empty_norm_output


class Programs(NamedTuple):
    """Programs of a launch: one a multiprocessor at the most. With several, some graphs stood still for milliseconds.

    Attributes:
        slots: of one-shot collectives over slots.
        data: of all collectives over `data`.
    """

    slots: int = 64
    data: int = 128


PROGRAMS = Programs()
SIZES = (2, 4, 8)
"""Ranks that the kernels are built for."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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


def kernels_can_run(x: Tensor) -> bool:
    """Whether the kernels can read x: contiguous, of a dtype that they know, in whole 16 bytes."""
    return supports_shape(x.shape, x.dtype) and x.is_contiguous() and x.data_ptr() % 16 == 0


def supports_shape(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the kernels can read rows of that shape."""
    return dtype in DTYPES and len(shape) > 0 and 0 not in shape and shape[-1] * dtype.itemsize % 16 == 0


def one_shot(workspace: SymmetricWorkspace, x: Tensor) -> Tensor:
    """The sum of x over ranks: every rank reads all of it."""
    from torchweave.ops.kernels.collectives.all_reduce import launch_one_shot

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_one_shot(workspace, x, out, workspace.locate_operand(x))
    return out


def can_gather(x: Tensor, dim: int) -> bool:
    """Whether the kernel can move x: what follows `dim` is contiguous, in whole 16 bytes."""
    inner = math.prod(x.shape[dim:]) * x.dtype.itemsize
    return x.numel() > 0 and x.is_contiguous() and inner % 16 == 0 and x.data_ptr() % 16 == 0


def gather(workspace: SymmetricWorkspace, x: Tensor, dim: int) -> Tensor:
    """x of all ranks one after the other along `dim`."""
    from torchweave.ops.kernels.collectives.all_reduce import launch_gather

    size = workspace.layout.size
    out = torch.empty((*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]), dtype=x.dtype, device=x.device)
    inner = math.prod(x.shape[dim:]) * x.dtype.itemsize // 4
    launch_gather(workspace, x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), inner)
    return out


def two_shot(workspace: SymmetricWorkspace, x: Tensor) -> Tensor:
    """The sum of x over ranks: every rank adds its share, then all gather the shares."""
    from torchweave.ops.kernels.collectives.all_reduce import launch_two_shot

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_two_shot(workspace, x, out, workspace.locate_in_data(x))
    return out


def one_shot_norm(workspace: SymmetricWorkspace, x: Tensor, norm: NormSpec) -> NormOutput:
    """The sum of x over ranks and what follows it, in one launch."""
    from torchweave.ops.kernels.collectives.all_reduce_norm import launch_one_shot_norm

    out = empty_norm_output(x, norm)
    launch_one_shot_norm(workspace, x, contiguous(norm), out, workspace.locate_operand(x))
    return out


def contiguous(norm: NormSpec) -> NormSpec:
    """The same with a residual whose rows lie behind each other."""
    if norm.residual is None or norm.residual.is_contiguous():
        return norm
    return replace(norm, residual=norm.residual.contiguous())


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
