"""What collectives would launch on this rank, without meeting another one: for looking at launches that are not carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchweave.distributed.symmetric_memory import SymmetricCommunicator
from torchweave.ops.collectives.all_reduce_norm import NormSpec
from torchweave.ops.collectives.op import find_communicator, register_communicator


class FakeCommunicator:
    """Stands in for torch.distributed: results have their shapes, and nothing is exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x.new_empty(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:])

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> None: ...

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> None: ...

    def abort(self) -> None: ...

    def fault(self) -> None: ...


@contextmanager
def fake_collectives(group: str) -> Iterator[bool]:
    """In here ops that name the group launch its kernels over symmetric memory and leave out what torch.distributed would carry.

    Kernels that are launched for real would wait for other ranks. Yields whether there is anything to look at: over
    torch.distributed alone no kernel is the project's.
    """
    found = find_communicator(group)
    if not isinstance(found, SymmetricCommunicator):
        yield False
        return
    fake = FakeCommunicator(found.rank, found.size)
    status = torch.zeros(1, dtype=torch.int32)
    register_communicator(group, SymmetricCommunicator(found.workspace, fake, found.size_limits, status))
    try:
        yield True
    finally:
        register_communicator(group, found)
