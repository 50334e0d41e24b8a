"""Collectives over torch.distributed (NCCL on GPUs, gloo on CPUs), as `torchweave.ops.collectives.op` asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import NormSpec

# The names that torch 2.13 gives to what older ones call `..._into_tensor` and `..._tensor`.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_of_ranks(parts: Tensor) -> Tensor:
    """`[size, ...]` -> the sum over ranks: added in float32 in their order, rounded once. What every faster sum is held to."""
    wide = torch.float32 if parts.dtype.itemsize < 4 and parts.dtype.is_floating_point else parts.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts.dtype, copy=len(parts) == 1)


class ProcessGroupCommunicator:
    """A group of torch.distributed.

    Over NCCL sums are NCCL's own: in an order that depends on its algorithm, in the dtype of x, and the same on all ranks. Over
    gloo, where speed is not asked for, every rank gathers all parts and adds them itself, in the order of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._is_nccl = group.name() == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._is_nccl:
            return sum_of_ranks(self._gather_parts(x))
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = self._gather_parts(x)
        return parts.movedim(0, dim).reshape(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.size
        if not self._is_nccl:
            return sum_of_ranks(self._gather_parts(x)[:, self.rank * rows : (self.rank + 1) * rows])
        out = x.new_empty(rows, *x.shape[1:])
        _reduce_scatter(out, x, group=self.group)
        return out

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> None:
        """None: torch.distributed reads any memory."""

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> None:
        """None: the parts."""

    def abort(self) -> None:
        """Whoever leaves the world aborts its process groups."""

    def fault(self) -> None:
        """None: torch.distributed raises."""

    def _gather_parts(self, x: Tensor) -> Tensor:
        """x of all ranks, `[size, ...]`."""
        parts = x.new_empty(self.size, *x.shape)
        _gather(parts.view(-1), x.reshape(-1), group=self.group)
        return parts
