"""`Communicator` of `torchweave.ops.collectives.op` over torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import NormSpec

# Renamed in torch 2.13 from `..._into_tensor` and `..._tensor`.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_of_ranks(parts: Tensor) -> Tensor:
    """`[size, ...]` -> sum over ranks, added in rank order in float32 and rounded once: the reference for faster sums."""
    wide = torch.float32 if parts.dtype.itemsize < 4 and parts.dtype.is_floating_point else parts.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts.dtype, copy=len(parts) == 1)


class ProcessGroupCommunicator:
    """Collectives of a torch.distributed group.

    NCCL sums in the dtype of x, in an order that depends on its algorithm, with the same result on all ranks. Over gloo every rank
    gathers all parts and adds them in rank order (`sum_of_ranks`).
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
        """None: torch.distributed accepts any memory."""

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> None:
        """None: not fused."""

    def abort(self) -> None:
        """Nothing: `process_groups.abort_groups` aborts NCCL's groups."""

    def fault(self) -> None:
        """None: torch.distributed raises errors itself."""

    def _gather_parts(self, x: Tensor) -> Tensor:
        """Gather x of all ranks as `[size, ...]`."""
        parts = x.new_empty(self.size, *x.shape)
        _gather(parts.view(-1), x.reshape(-1), group=self.group)
        return parts
