"""Split all-reduce, add and RMSNorm by rows: each rank reduces, adds and normalizes its own rows, and the result is gathered.

Before                                                After
    y1, h1 = all_reduce_add_rms_norm(x1, r, ...)          own1 = add(reduce_scatter(x1), own_rows(r))
    y2, h2 = all_reduce_add_rms_norm(f(y1), h1, ...)      y1 = all_gather(rms_norm(own1))
                                                          own2 = add(reduce_scatter(f(y1)), own1)
                                                          h2 = all_gather(own2); y2 = rms_norm(h2)

When      nothing reads the sum before the norm, or only one further collective of the same group does, as its residual; tokens
          lie in one dimension. Where other operations read the last sum whole, it is gathered instead of its norm, which every
          rank then computes. A quantized norm is gathered quantized.
Numerics  exact: adding and normalizing are independent for each row. NCCL may add ranks in another order.
Pays      at many tokens, beyond the counts for which collectives use symmetric memory: ranks send as much, or less where the
          norm is quantized, and share the add and the norm. Only from the token count that a table of measurements gives for
          this number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import torchweave.ops.collectives.sequence_parallel_norm  # noqa: F401 (defines torchweave::own_rows)
from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import normalize_call
from torchweave.compiler.passes.base import GraphPass, NearMiss, Need, PassResult, Stage, TokenRange
from torchweave.compiler.passes.collectives.user_buffers import (
    next_collective,
    profitable_token_range,
    sum_output,
    table_shape,
)
from torchweave.compiler.passes.rewrite import insert, same_tensor_metadata
from torchweave.compiler.tuning.table import Table
from torchweave.ops.collectives.all_reduce_norm import NormSpec, QuantSpec
from torchweave.ops.collectives.sequence_parallel_norm import RowSharding, row_sharded_norm

ops = torch.ops.torchweave
_PLAIN = ops.all_reduce_add_rms_norm.default
_FP8 = ops.all_reduce_add_rms_norm_fp8.default
_FP4 = ops.all_reduce_add_rms_norm_fp4.default
ALL_REDUCE_NORM_OPS = (_PLAIN, _FP8, _FP4)


class SequenceParallel(GraphPass):
    """See the module's text.

    Args:
        table: measurements.
        ranks: tensor-parallel size.
    """

    name = "sequence_parallel"
    stage: Stage = "aten"
    gated = True
    needs: tuple[Need, ...] = ("ranks",)

    def __init__(self, table: Table | None = None, ranks: int = 1) -> None:
        self.shape = table_shape(ranks)
        self.token_range: TokenRange = profitable_token_range(table, self.name, self.shape)

    def run(self, graph: FakeGraph) -> PassResult:
        near_misses: list[NearMiss] = []
        local_rows_of: dict[fx.Node, fx.Node] = {}  # sum -> node with this rank's rows of it
        matches = 0
        for node in list(graph.graph.nodes):
            if node.target not in ALL_REDUCE_NORM_OPS:
                continue
            total = sum_output(node)
            next_op = None if total is None else next_collective(node, total, ALL_REDUCE_NORM_OPS, residual_at=1)
            residual = node.args[1]
            if isinstance(next_op, str) and residual not in local_rows_of:
                near_misses.append(NearMiss(node.name, next_op))
                continue
            if residual is None:
                near_misses.append(NearMiss(node.name, "it has no residual that could stay sharded"))
                continue
            local_rows = _rewrite(graph, node, local_rows_of.get(residual), isinstance(next_op, fx.Node))
            if total is not None and local_rows is not None:
                local_rows_of[total] = local_rows
            matches += 1
        graph.graph.eliminate_dead_code()
        return PassResult(matches, matches, tuple(near_misses))


def _rewrite(graph: FakeGraph, node: fx.Node, local_rows: fx.Node | None, leaves_rows: bool) -> fx.Node | None:
    """Replace a collective by the row-sharded form.

    Args:
        local_rows: this rank's rows of the residual, if an earlier collective left them.
        leaves_rows: keep the sum sharded.

    Returns:
        The node of this rank's rows of the sum if `leaves_rows`, else None.
    """
    target: Any = node.target
    x, residual, weight, eps, offset, wide, *quant, group = normalize_call(target, node.args, node.kwargs)[0]
    read: dict[int, fx.Node] = {int(user.args[1]): user for user in node.users if user.users}  # type: ignore[arg-type]
    last = len(value(node)) - 1
    keep_norm, keep_sum = last - 1 in read, last in read
    sharding = RowSharding(str(group), residual=local_rows is not None, total=leaves_rows)
    scale = None if target is _PLAIN else quant[-3]

    def by_rows(x: Any, residual: Any, weight: Any, scale: Any) -> list[Any]:
        how = None
        if target is _FP8:
            how = QuantSpec("fp8", quant[0], scale)
        elif target is _FP4:
            how = QuantSpec("fp4", scale=scale)
        norm = NormSpec(residual, weight, eps, offset, wide, how, keep_norm or how is None, keep_sum)
        normed = row_sharded_norm(x, norm, sharding)
        results = [normed.y, normed.total] if how is None else [normed.q, normed.s, normed.y, normed.total]
        return [results[index] for index in sorted(read)]

    new = dict(zip(sorted(read), insert(graph, node, by_rows, [x, local_rows or residual, weight, scale]), strict=True))
    for index, user in read.items():
        if not (leaves_rows and index == last):
            assert same_tensor_metadata(value(new[index]), value(user)), (
                "gathered rows must have the shape of the whole tensor"
            )
            user.replace_all_uses_with(new[index])
    return new[last] if leaves_rows else None
