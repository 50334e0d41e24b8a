"""A rank's part of a parameter, and reading it without the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Range = tuple[int, int]
"""(begin, end), end exclusive."""
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class TensorShard:
    """Concatenated ranges of one dimension of a parameter.

    Attributes:
        full: shape of the whole parameter.
        dim: the sharded dimension.
        ranges: this rank's ranges in order; ranks may share a range.
        pad: rows of zeros appended so that all ranks have the same shape.
        zero: this rank holds zeros of the full shape, since rank 0 alone adds the value to a sum over ranks.
    """

    full: tuple[int, ...]
    dim: int = 0
    ranges: tuple[Range, ...] = ()
    pad: int = 0
    zero: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.zero:
            return self.full
        length = sum(end - begin for begin, end in self.ranges) + self.pad
        return (*self.full[: self.dim], length, *self.full[self.dim + 1 :])

    def extract(self, whole: Any) -> Tensor:
        """Copy this rank's part of a tensor or safetensors slice; only that part of a slice is read."""
        if self.zero:
            like = whole[tuple(slice(0, 1) for _ in self.full)]
            return torch.zeros(self.full, dtype=like.dtype, device=like.device)
        before = (slice(None),) * self.dim
        parts = [whole[(*before, slice(begin, end))] for begin, end in self.ranges if end > begin]
        if self.pad:
            like = parts[0] if parts else whole[(*before, slice(0, 1))]
            parts.append(like.new_zeros(*self.full[: self.dim], self.pad, *self.full[self.dim + 1 :]))
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def num_bytes(self, full: int) -> int:
        """This rank's bytes of a tensor of `full` bytes."""
        return full * math.prod(self.shape) // max(1, math.prod(self.full))

    def for_block_scales(self, block: int, full: Sequence[int]) -> TensorShard | None:
        """The shard of a tensor with one value per `block` of the dimension; None: a range splits a block."""
        length = self.full[self.dim]
        if self.pad or any(begin % block or (end % block and end != length) for begin, end in self.ranges):
            return None
        ranges = tuple((begin // block, -(-end // block)) for begin, end in self.ranges)
        return TensorShard(tuple(full), self.dim, ranges)


def even_shard(full: Sequence[int], dim: int, rank: int, size: int, parts: int = 1) -> TensorShard | None:
    """An equal part of each of `parts` equal stretches (gate and up); None: not divisible."""
    length = full[dim]
    if length % (parts * size):
        return None
    part_length, own = length // parts, length // parts // size
    ranges = tuple((p * part_length + rank * own, p * part_length + (rank + 1) * own) for p in range(parts))
    return TensorShard(tuple(full), dim, ranges)


def padded_shard(full: Sequence[int], dim: int, rank: int, size: int) -> TensorShard:
    """One of `size` parts of `ceil(length / size)` rows; the last ones are padded with zeros."""
    length = full[dim]
    own = -(-length // size)
    begin, end = min(rank * own, length), min((rank + 1) * own, length)
    return TensorShard(tuple(full), dim, ((begin, end),), own - (end - begin))


@dataclass(frozen=True)
class HeadSharding:
    """Distribution of attention heads over ranks.

    Attributes:
        query, kv: query heads and KV heads of the whole model.
        rank, size: rank and size of the tensor-parallel group.
    """

    query: int
    kv: int
    rank: int
    size: int

    @property
    def indivisible_reason(self) -> str:
        """Why the heads cannot be distributed; empty if they can."""
        if self.query % self.size:
            return f"its {self.query} attention heads"
        if self.kv % self.size and self.size % self.kv:
            return f"its {self.kv} key and value heads, neither a multiple nor a divisor of the ranks,"
        return ""

    @property
    def num_local_query(self) -> int:
        return self.query // self.size

    @property
    def num_local_kv(self) -> int:
        """At least one: fewer heads than ranks are replicated."""
        return max(1, self.kv // self.size)

    @property
    def first_local_kv(self) -> int:
        return self.rank * self.kv // self.size

    def query_range(self, unit: int, start: int = 0) -> Range:
        """This rank's rows of query heads with `unit` rows each, starting at `start`."""
        first = self.rank * self.num_local_query
        return start + first * unit, start + (first + self.num_local_query) * unit

    def kv_range(self, unit: int, start: int = 0) -> Range:
        """This rank's rows of KV heads with `unit` rows each, starting at `start`."""
        return start + self.first_local_kv * unit, start + (self.first_local_kv + self.num_local_kv) * unit
