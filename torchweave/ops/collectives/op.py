"""Collectives as ops of the graph: `torchweave::all_reduce`, `torchweave::all_gather`, `torchweave::reduce_scatter`.

An op names its group of ranks by a string, and nothing in a graph says which rank runs it: all ranks run the same graph. What
carries an op out is the `Communicator` that was registered under the group's name, which `torchweave.distributed` does when the
world begins.

All are functions: the result is a new tensor. They may be moved as far as their operands allow, but on every rank in the same way:
two ranks that meet in different collectives wait for each other for ever.

Numerics: a sum over ranks is a float32 sum in the order of the ranks, rounded once, so that every rank has the same bits: what
follows (sampling above all) is computed on every rank and must agree. NCCL adds in another order, again one for all ranks.
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
        """x of all ranks one after the other along `dim`, which is not negative; x has one shape on all ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum: x `[size * T, D]` -> `[T, D]`."""
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> Tensor | None:
        """Room in memory that all ranks see, for what the next collective reads; None where it would copy its operand anyway.

        Who gets it writes all of it, and hands it to `all_reduce` or `fused_all_reduce_norm`, as the next collective
        of this rank. Two
        collectives that follow each other, in whatever order graphs are replayed, have different slots (0, 1 or 2).
        """
        ...

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> NormOutput | None:
        """The sum of x `[..., D]` over ranks and what follows it, in one kernel; None where the parts are the faster way."""
        ...

    def abort(self) -> None:
        """End what waits for other ranks on this device: one of them has died."""
        ...

    def fault(self) -> str | None:
        """Why results of this device are worth nothing since a while, where its kernels can say so; never waits."""
        ...


_COMMUNICATORS: dict[str, Communicator] = {}


def register_communicator(group: str, communicator: Communicator | None) -> None:
    """Let ops that name `group` run over `communicator`, instead of the one before; none: the group is gone."""
    if communicator is None:
        _COMMUNICATORS.pop(group, None)
    else:
        _COMMUNICATORS[group] = communicator


def find_communicator(group: str) -> Communicator | None:
    """What was registered under the group's name; None: nothing was, or the group is gone."""
    return _COMMUNICATORS.get(group)


def communicator(group: str) -> Communicator:
    """What was registered under the group's name.

    Raises:
        ValueError: nothing was.
    """
    found = find_communicator(group)
    if found is None:
        known = ", ".join(sorted(_COMMUNICATORS)) or "none"
        raise ValueError(
            f"There is no group of ranks {group!r} (known: {known}); a world must be initialised before its collectives run."
        )
    return found


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
    """x of all ranks, in their order, one after the other along `dim` (negative: from the end); contiguous."""
    return communicator(group).all_gather(x.contiguous(), dim % x.ndim)


def rows_per_rank(num_rows: int, size: int) -> int:
    """Rows of a tensor of `num_rows` that each of `size` ranks owns; the last ones own padding where it does not divide."""
    return (num_rows + size - 1) // size


def own_rows(x: Tensor, rank: int, size: int) -> Tensor:
    """The rows of x `[..., T, D]` that `reduce_scatter` leaves to a rank, zeros behind the last: `[..., ceil(T / size), D]`."""
    tokens = x.shape[-2]
    own = rows_per_rank(tokens, size)
    begin = min(rank * own, tokens)
    rows = x.narrow(-2, begin, min(own, tokens - begin))
    return torch.nn.functional.pad(rows, (0, 0, 0, own - rows.shape[-2])).contiguous()


def _fake_reduce_scatter(x: Tensor, group: str) -> Tensor:
    shape = (*x.shape[:-2], rows_per_rank(x.shape[-2], communicator(group).size), x.shape[-1])
    return torch.empty(shape, dtype=x.dtype, device=x.device)


@define("torchweave::reduce_scatter", fake=_fake_reduce_scatter)
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum of x over ranks: `[..., T, D]` -> `[..., ceil(T / size), D]`.

    Rank r owns rows `r * ceil(T / size)` and following; rows from T on are zeros. `all_gather(..., -2)` followed by a narrowing to
    T rows gives what `all_reduce` does.
    """
    comm = communicator(group)
    own = rows_per_rank(x.shape[-2], comm.size)
    missing = own * comm.size - x.shape[-2]
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()  # no padding would be a copy
    rows = padded.movedim(-2, 0)
    out = comm.reduce_scatter(rows.reshape(own * comm.size, -1))
    return out.view(own, *rows.shape[1:]).movedim(0, -2).contiguous()
