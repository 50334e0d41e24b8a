"""Collectives as ops of the graph: `torchweave::all_reduce`, `torchweave::all_gather`, `torchweave::reduce_scatter`.

An op names its group of ranks by a string, so that all ranks run the same graph. The `Communicator` registered under that name
runs the op; `torchweave.distributed` registers it when the process groups start.

All ops are functional: the result is a new tensor. A pass may move them as far as their operands allow, but in the same order
on every rank: two ranks in different collectives wait for each other forever.

Numerics: a float32 sum in the order of the ranks, rounded once, so that every rank has the same bits: later results (sampling
above all) are computed on every rank and must agree. NCCL adds in another order, also the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from torchweave.ops.registry import define

if TYPE_CHECKING:
    from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec


class Communicator(Protocol):
    """One rank's end of a group of ranks. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in a new tensor."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """x of all ranks concatenated along `dim`, which is not negative; x has one shape on all ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum: x `[size * T, D]` -> `[T, D]`."""
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> Tensor | None:
        """Buffer in symmetric memory for the operand of the next collective; None where that collective copies its operand.

        The caller writes all of it and passes it to `all_reduce` or `fused_all_reduce_norm`, as this rank's next collective.
        Two consecutive collectives, in whatever order graphs are replayed, have different slots (0, 1 or 2).
        """
        ...

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> NormOutput | None:
        """The sum of x `[..., D]` over ranks and the fused norm, in one kernel; None where separate ops are faster."""
        ...

    def abort(self) -> None:
        """Abort the kernels of this device that wait for other ranks, because a rank has died."""
        ...

    def fault(self) -> str | None:
        """Why this device's results are invalid, if its kernels report it; does not block."""
        ...


_COMMUNICATORS: dict[str, Communicator] = {}


def register_communicator(group: str, communicator: Communicator | None) -> None:
    """Make `communicator` run the ops that name `group`, instead of the previous one; None removes the group."""
    if communicator is None:
        _COMMUNICATORS.pop(group, None)
    else:
        _COMMUNICATORS[group] = communicator


def find_communicator(group: str) -> Communicator | None:
    """The communicator of the group; None if none is registered."""
    return _COMMUNICATORS.get(group)


def communicator(group: str) -> Communicator:
    """The communicator of the group.

    Raises:
        ValueError: no communicator is registered under that name.
    """
    registered = find_communicator(group)
    if registered is None:
        known = ", ".join(sorted(_COMMUNICATORS)) or "none"
        raise ValueError(
            f"no group of ranks {group!r} is registered, only: {known}; initialize the process groups before collectives run"
        )
    return registered


def group_size(group: str) -> int:
    """Number of ranks of a group."""
    return communicator(group).size


def _fake_all_reduce(x: Tensor, group: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@define("torchweave::all_reduce", fake=_fake_all_reduce)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of x over the ranks of `group`: `[...]` of x's shape and dtype, contiguous."""
    return communicator(group).all_reduce(x.contiguous())


def _fake_all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    shape, dim = list(x.shape), dim % x.ndim
    shape[dim] = shape[dim] * communicator(group).size
    return torch.empty(shape, dtype=x.dtype, device=x.device)


@define("torchweave::all_gather", fake=_fake_all_gather)
def all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    """x of all ranks, in the order of the ranks, concatenated along `dim` (negative: from the end); contiguous."""
    return communicator(group).all_gather(x.contiguous(), dim % x.ndim)


def rows_per_rank(num_rows: int, size: int) -> int:
    """Rows of a tensor of `num_rows` that each of `size` ranks owns; the last ranks own padding if it does not divide."""
    return (num_rows + size - 1) // size


def own_rows(x: Tensor, rank: int, size: int) -> Tensor:
    """The rows of x `[..., T, D]` that `reduce_scatter` gives to a rank, padded with zeros: `[..., ceil(T / size), D]`."""
    tokens = x.shape[-2]
    own = rows_per_rank(tokens, size)
    begin = min(rank * own, tokens)
    rows = x.narrow(-2, begin, min(own, tokens - begin))
    return torch.nn.functional.pad(rows, (0, 0, 0, own - rows.shape[-2])).contiguous()


def fake_own_rows(x: Tensor, group: str) -> Tensor:
    """`[..., T, D]` -> `[..., ceil(T / size), D]`."""
    shape = (*x.shape[:-2], rows_per_rank(x.shape[-2], communicator(group).size), x.shape[-1])
    return torch.empty(shape, dtype=x.dtype, device=x.device)


@define("torchweave::reduce_scatter", fake=fake_own_rows)
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum of x over ranks: `[..., T, D]` -> `[..., ceil(T / size), D]`.

    Rank r owns the rows from `r * ceil(T / size)`; rows from T on are zeros. `all_gather(..., -2)` narrowed to T rows equals
    `all_reduce`.
    """
    comm = communicator(group)
    own = rows_per_rank(x.shape[-2], comm.size)
    missing = own * comm.size - x.shape[-2]
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()  # no padding would be a copy
    rows = padded.movedim(-2, 0)
    out = comm.reduce_scatter(rows.reshape(own * comm.size, -1))
    return out.view(own, *rows.shape[1:]).movedim(0, -2).contiguous()
