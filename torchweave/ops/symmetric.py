"""Memory that all ranks of a group see, as the kernels over it use it: its layout, and which kernel runs for what size.

One allocation on every rank, of the same layout:

    flags       what programs of other ranks wrote when they came to a meeting; two channels, one-shot and two-shot
    slots 0-4   operands of one-shot collectives: 0 and 1 staged in turn by the kernel itself, 2-4 written by whoever made them
    data        the operand of a two-shot collective
    sums        this rank's share of its result

A one-shot collective has one meeting. Its slot may be written again once every rank has *begun* the collective after it, which
is known when that one has ended here: so no two collectives that follow each other use the same slot, and then nobody needs to
meet a second time. A two-shot collective meets twice; after its second meeting nobody reads `data` any more, and `sums` is
written only after the next one's first meeting: one place of each is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchweave.ops.collectives_fused import Norm, Normed, empty_normed

PROGRAMS = (64, 128)
"""Programs of every one-shot and every two-shot launch: few enough to be on the GPU at once, enough for the links."""
SIZES = (2, 4, 8)
"""Ranks that the kernels are built for."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALL_PHASES = 15
_PAGE = 4096
_STAGES, _SLOTS = 2, 3


@dataclass(frozen=True)
class Layout:
    """Bytes of a rank's memory.

    Attributes:
        size: number of ranks.
        one_shot, two_shot: the largest operands, in bytes.
    """

    size: int
    one_shot: int
    two_shot: int

    def flags(self, channel: int) -> int:
        """Where the words of a channel begin: int32 `[programs, size]`."""
        return channel * _pages(max(PROGRAMS) * self.size * 4)

    def slot(self, index: int) -> int:
        return self.flags(2) + index * _pages(self.one_shot)

    @property
    def data(self) -> int:
        return self.slot(_STAGES + _SLOTS)

    @property
    def sums(self) -> int:
        return self.data + _pages(self.two_shot)

    @property
    def bytes(self) -> int:
        return self.sums + _pages(self.two_shot // self.size + 16 * self.size)


class Place(NamedTuple):
    """Where a collective reads its operand.

    Attributes:
        at: byte of each rank's memory.
        other_at: with `staged`, the place that takes turns with it.
        staged: whether the kernel copies the operand there itself.
    """

    at: int
    other_at: int
    staged: bool


@dataclass(frozen=True)
class Workspace:
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
    layout: Layout
    memory: Tensor
    table: Tensor
    counters: Tensor

    def room(self, shape: Sequence[int], dtype: torch.dtype, at: int) -> Tensor:
        """This rank's bytes from `at` on as a tensor."""
        size = math.prod(shape) * dtype.itemsize
        return self.memory[at : at + size].view(dtype).view(*shape)

    def slot(self, index: int) -> int:
        """Where the operand of a one-shot collective lies that its maker wrote into slot `index`, 0 to 2."""
        assert 0 <= index < _SLOTS, f"slot {index}: there are {_SLOTS}"
        return self.layout.slot(_STAGES + index)

    def one_shot_place(self, x: Tensor) -> Place:
        """Where x is, if it is in a slot; else where it will be copied."""
        at = self._position(x)
        if at in map(self.slot, range(_SLOTS)):
            return Place(at, at, False)
        return Place(self.layout.slot(0), self.layout.slot(1), True)

    def two_shot_place(self, x: Tensor) -> Place:
        """As `one_shot_place`, of a two-shot collective's only place."""
        return Place(self.layout.data, self.layout.data, self._position(x) != self.layout.data)

    def _position(self, x: Tensor) -> int:
        return x.data_ptr() - self.memory.data_ptr()


def can_run(x: Tensor) -> bool:
    """Whether the kernels can read x: contiguous, of a dtype that they know, in whole 16 bytes."""
    return runs(x.shape, x.dtype) and x.is_contiguous() and x.data_ptr() % 16 == 0


def runs(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the kernels can read rows of that shape."""
    return dtype in DTYPES and len(shape) > 0 and 0 not in shape and shape[-1] * dtype.itemsize % 16 == 0


def one_shot(workspace: Workspace, x: Tensor) -> Tensor:
    """The sum of x over ranks: every rank reads all of it."""
    from torchweave.ops.kernels.symmetric_reduce import launch_one_shot

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_one_shot(workspace, x, out, workspace.one_shot_place(x))
    return out


def can_gather(x: Tensor, dim: int) -> bool:
    """Whether the kernel can move x: what follows `dim` is contiguous, in whole 16 bytes."""
    inner = math.prod(x.shape[dim:]) * x.dtype.itemsize
    return x.numel() > 0 and x.is_contiguous() and inner % 16 == 0 and x.data_ptr() % 16 == 0


def gather(workspace: Workspace, x: Tensor, dim: int) -> Tensor:
    """x of all ranks one after the other along `dim`."""
    from torchweave.ops.kernels.symmetric_reduce import launch_gather

    size = workspace.layout.size
    out = torch.empty((*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]), dtype=x.dtype, device=x.device)
    inner = math.prod(x.shape[dim:]) * x.dtype.itemsize // 4
    launch_gather(workspace, x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), inner)
    return out


def two_shot(workspace: Workspace, x: Tensor) -> Tensor:
    """The sum of x over ranks: every rank adds its share, then all gather the shares."""
    from torchweave.ops.kernels.symmetric_reduce import launch_two_shot

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_two_shot(workspace, x, out, workspace.two_shot_place(x))
    return out


def one_shot_norm(workspace: Workspace, x: Tensor, norm: Norm) -> Normed:
    """The sum of x over ranks and what follows it, in one launch."""
    from torchweave.ops.kernels.symmetric_norm import launch_one_shot_norm

    out = empty_normed(x, norm)
    launch_one_shot_norm(workspace, x, contiguous(norm), out, workspace.one_shot_place(x))
    return out


def contiguous(norm: Norm) -> Norm:
    """The same with a residual whose rows lie behind each other."""
    if norm.residual is None or norm.residual.is_contiguous():
        return norm
    return replace(norm, residual=norm.residual.contiguous())


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
