"""Linears whose weight dwarfs what it is multiplied with become an op that chooses its kernel when it runs.

Before                                  After
    y = linear(x, W, b)                     y = torchweave.linear(x, W, b, choices)

When      x is [T, K] or [1, T, K] with T dynamic, W [N, K] and b [N] are parameters on a GPU, and `torchweave.ops.linear` has
          kernels for that shape and dtype: bfloat16 or float16, K a multiple of 8, N * K at least a million.
Numerics  exact: only the order of a sum differs. The op's kernel sums in float32 and rounds once; where the BLAS does so too,
          they differ by no more than 2 * K * 2**-24 * sum(|x * W|) and one unit in the last place. Beyond the tokens that
          `choices` names the op calls the BLAS, and nothing differs.
Pays      at the tokens where a table of measurements says so (`compile/tuning`): the weight is read nearer to the memory's
          bandwidth. The op chooses when it runs, which is when a CUDA graph of one token count is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.graph import CapturedGraph, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import GraphPass, Mismatch, NearMiss, Numerics, PassResult
from torchweave.compiler.passes.torch_ir.merge_linears import LINEAR
from torchweave.compiler.tuning.linears import LinearShape
from torchweave.compiler.tuning.table import Table, device_kind, shipped_table
from torchweave.ops.linear_config import supported


class SmallLinears(GraphPass):
    """See the module's text.

    Args:
        devices: types of devices on which linears are replaced. Elsewhere the op is its reference, and of no use but to tests.
        table: what measurements say; None takes what the package ships for the device.
    """

    name = "small_linears"
    numerics: Numerics = "exact"

    def __init__(self, devices: Iterable[str] = ("cuda",), table: Table | None = None) -> None:
        self.devices = frozenset(devices)
        self._table, self.table = table, "shipped" if table is None else table.digest

    def run(self, graph: CapturedGraph) -> PassResult:
        matches = 0
        rejected: dict[str, list[str]] = {}
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node.target is not LINEAR or value(node).device.type not in self.devices:
                continue
            why = _replace(graph, node, self._table)
            if why is None:
                matches += 1
            else:
                rejected.setdefault(why, []).append(node.name)
        near_misses = tuple(NearMiss(", ".join(names), why) for why, names in rejected.items())
        return PassResult(matches, matches, near_misses)


def _replace(graph: CapturedGraph, node: fx.Node, table: Table | None) -> str | None:
    """Put the op in the place of a linear; the reason when it is left alone."""
    try:
        x, weight, bias = GraphPass.bind(node, "input", "weight", bias=None)
    except Mismatch as mismatch:
        return str(mismatch)
    why = _reject_reason(graph, x, weight, bias)
    if why is not None:
        return why
    op, w = torch.ops.torchweave.linear.default, value(weight)
    table = shipped_table(device_kind(w.device)) if table is None else table
    choices = LinearShape(w.shape[0], w.shape[1]).choices(table, w.dtype)
    if not choices:
        return f"for {str(value(weight).dtype).removeprefix('torch.')} {list(value(weight).shape)} the BLAS measured fastest"
    result = graph.fake_ops.run(op, (value(x), value(weight), None if bias is None else value(bias), choices), {})
    if not same_geometry(result, value(node)):
        return "its result has another layout or dtype than the op's"
    with graph.graph.inserting_before(node):
        new = graph.graph.call_function(op, (x, weight, bias, choices))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
    return None


def _reject_reason(graph: CapturedGraph, x: Any, weight: Any, bias: Any) -> str | None:
    """Why the op cannot take these, or would only ever call the BLAS; None when it pays."""
    w, b = graph.constant(weight), graph.constant(bias)
    if w is None or (bias is not None and b is None):
        return "its weight or bias is computed, not a parameter"
    if type(w) not in (Tensor, torch.nn.Parameter):
        return f"its weight is a {type(w).__name__}"
    if w.ndim != 2:
        return f"its weight has {w.ndim} dimensions"
    if b is not None and (b.shape != w.shape[:1] or not b.is_contiguous()):
        return "its bias is not one contiguous number a row"
    *batch, tokens, _ = (1, *value(x).shape)
    if not isinstance(tokens, torch.SymInt):
        return f"it always has {tokens} tokens"
    if any(isinstance(size, torch.SymInt) or size != 1 for size in batch):
        return "its tokens are in more than one dimension"
    if not supported(w.shape[0], w.shape[1], w.dtype):
        return f"for {str(w.dtype).removeprefix('torch.')} {list(w.shape)} there is only the BLAS"
    return None
