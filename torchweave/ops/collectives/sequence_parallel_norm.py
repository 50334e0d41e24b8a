"""The norm behind an all-reduce with its work divided among the ranks: each reduces, adds and normalises its own rows.

    all_reduce -> add -> norm            every rank does all T rows of the add and the norm
    reduce_scatter -> add -> norm -> all_gather
                                         every rank does ceil(T / size) rows, and the sum before the norm can stay where it is

Ranks send as much in both: an all-reduce is a reduce-scatter and an all-gather. What is saved is the work on other ranks' rows, and
half of the second exchange where the norm is quantised before it is gathered. Numbers are those of the ops done apart: rows know
nothing of each other.

Rows of a rank are those of `torchweave::reduce_scatter`: `[..., T, D]` -> `[..., ceil(T / size), D]`, with zeros behind the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchweave.ops.collectives import op
from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec, apply_norm
from torchweave.ops.collectives.op import communicator, rows_per_rank
from torchweave.ops.registry import define

_ops = torch.ops.torchweave


def _fake_own_rows(x: Tensor, group: str) -> Tensor:
    shape = (*x.shape[:-2], rows_per_rank(x.shape[-2], communicator(group).size), x.shape[-1])
    return torch.empty(shape, dtype=x.dtype, device=x.device)


@define("torchweave::own_rows", fake=_fake_own_rows)
def own_rows(x: Tensor, group: str) -> Tensor:
    """The rows of x `[..., T, D]` that are this rank's: `[..., ceil(T / size), D]`. Nothing is exchanged."""
    comm = communicator(group)
    return op.own_rows(x, comm.rank, comm.size)


@dataclass(frozen=True)
class RowSharding:
    """Which sums before norms are a rank's own rows.

    Attributes:
        group: of ranks.
        residual: the residual is this rank's rows already.
        total: the sum before the norm is left as this rank's rows.
    """

    group: str
    residual: bool = False
    total: bool = False


def row_sharded_norm(x: Tensor, norm: NormSpec, sharding: RowSharding) -> NormOutput:
    """`fused_all_reduce_norm` with the work divided by rows; x `[..., T, D]`, leading dimensions of size 1."""
    assert norm.residual is not None, "without a residual nothing is kept in rows"
    residual = norm.residual if sharding.residual else _ops.own_rows(norm.residual, sharding.group)
    rows = _ops.reduce_scatter(x, sharding.group)
    if norm.keep_sum and not sharding.total:
        # Everybody needs the whole sum: it is gathered instead of the norm, which everybody then computes.
        total = _gather_rows(rows + residual, x.shape[-2], sharding.group)
        return apply_norm(total, replace(norm, residual=None))._replace(total=total)
    own = apply_norm(rows, replace(norm, residual=residual, keep_sum=sharding.total))
    y = None if own.y is None else _gather_rows(own.y, x.shape[-2], sharding.group)
    if own.q is None or own.s is None:
        return NormOutput(y, own.total)
    q, s = _gather_quantized_rows(own.q, own.s, x, norm, sharding.group)
    return NormOutput(y, own.total, q, s)


def _gather_rows(rows: Tensor, tokens: int, group: str) -> Tensor:
    return _ops.all_gather(rows, -2, group).narrow(-2, 0, tokens)


def _gather_quantized_rows(q: Tensor, s: Tensor, x: Tensor, norm: NormSpec, group: str) -> tuple[Tensor, Tensor]:
    """q and s of all ranks' rows, in the layouts of `fp8_quant` and `fp4_quant`. They travel as bytes."""
    quant, tokens = norm.quant, x.shape[-2]
    assert quant is not None
    q = _gather_rows(q.view(torch.uint8), tokens, group).view(q.dtype)
    if quant.to == "fp4":
        return q, _gather_rows(s.view(torch.uint8), tokens, group).view(s.dtype)
    if quant.scale is not None:
        return q, s
    if quant.group:
        return q, _ops.all_gather(s, 1, group).narrow(1, 0, tokens).contiguous()
    return q, _gather_rows(s, tokens, group)
