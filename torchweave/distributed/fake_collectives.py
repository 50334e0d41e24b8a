"""Collectives without other ranks, for enumerating kernel launches that are not executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchweave.distributed.symmetric_memory import SymmetricCommunicator
from torchweave.ops.collectives.all_reduce_norm import NormSpec
from torchweave.ops.collectives.op import find_communicator, register_communicator


class FakeCommunicator:
    """Replaces torch.distributed: results have the right shapes, without communication."""

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
    """Make collective ops of `group` launch only symmetric-memory kernels and skip torch.distributed in this context.

    Executed kernels would wait for other ranks. Yields whether the group uses symmetric memory: over torch.distributed alone it
    launches no kernel of this project.
    """
    original = find_communicator(group)
    if not isinstance(original, SymmetricCommunicator):
        yield False
        return
    fake = FakeCommunicator(original.rank, original.size)
    status = torch.zeros(1, dtype=torch.int32)
    register_communicator(group, SymmetricCommunicator(original.workspace, fake, original.size_limits, status))
    try:
        yield True
    finally:
        register_communicator(group, original)
