"""A group of ranks in one process, for tests that need a collective but no exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import NormSpec
from torchweave.ops.collectives.op import register_communicator


class Mirror:
    """`size` mirrored ranks, all with this rank's values; this one is rank `rank`."""

    def __init__(self, size: int = 2, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return (x.float() * self.size).to(x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank].clone()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> None:
        """None."""

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> None:
        """None."""

    def abort(self) -> None:
        """Nothing to wait for: all ranks are in this process."""

    def fault(self) -> None:
        """None."""


@contextmanager
def mirrored(group: str = "tp", size: int = 2, rank: int = 0) -> Iterator[str]:
    """Within, collectives over `group` run as if all ranks were mirrors of this process."""
    register_communicator(group, Mirror(size, rank))
    try:
        yield group
    finally:
        register_communicator(group, None)
