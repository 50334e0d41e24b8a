"""Sequence-parallel norm: the add and the RMSNorm after an all-reduce, divided by rows among the ranks.

    all_reduce -> add -> norm            every rank computes all T rows of the add and the norm
    reduce_scatter -> add -> norm -> all_gather
                                         every rank computes ceil(T / size) rows; the sum before the norm may stay sharded

Both send the same amount: an all-reduce is a reduce-scatter and an all-gather. The gain is the work on other ranks' rows, and
half of the second exchange where the norm is quantized before the gather. Results are bit-equal to the separate ops: rows are
independent.

A rank's rows are those of `torchweave::reduce_scatter`: `[..., T, D]` -> `[..., ceil(T / size), D]`, padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchweave.ops.collectives import op
from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec, apply_norm
from torchweave.ops.collectives.op import communicator
from torchweave.ops.registry import define

_ops = torch.ops.torchweave


@define("torchweave::own_rows", fake=op.fake_own_rows)
def own_rows(x: Tensor, group: str) -> Tensor:
    """This rank's rows of x `[..., T, D]`: `[..., ceil(T / size), D]`, without communication."""
    comm = communicator(group)
    return op.own_rows(x, comm.rank, comm.size)


@dataclass(frozen=True)
class RowSharding:
    """Which sums before norms are sharded by rows.

    Attributes:
        group: of ranks.
        residual: the residual has this rank's rows only.
        total: return this rank's rows of the sum before the norm.
    """

    group: str
    residual: bool = False
    total: bool = False


def row_sharded_norm(x: Tensor, norm: NormSpec, sharding: RowSharding) -> NormOutput:
    """`fused_all_reduce_norm` divided by rows; x `[..., T, D]`, leading dimensions of size 1."""
    assert norm.residual is not None, "row sharding needs a residual"
    residual = norm.residual if sharding.residual else _ops.own_rows(norm.residual, sharding.group)
    rows = _ops.reduce_scatter(x, sharding.group)
    if norm.keep_sum and not sharding.total:
        # All ranks need the whole sum: gather it instead of the norm, and compute the norm on every rank.
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
    """q and s of all ranks' rows, in the layouts of `fp8_quant` and `fp4_quant`; gathered as bytes."""
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
