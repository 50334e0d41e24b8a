"""Replace linears of few tokens and large weights by an op that selects its kernel at run time.

Before                                  After
    y = linear(x, W, b)                     y = torchweave.linear(x, W, b, choices)

When      x is [T, K] or [1, T, K] with dynamic T, W [N, K] and b [N] are parameters on a GPU, and `torchweave.ops.linear` has
          kernels for that shape and dtype: bfloat16 or float16, K a multiple of 8, N * K at least 2**15.
Numerics  exact: only the summation order differs. The kernel sums in float32 and rounds once; where the BLAS does so too, they
          differ by at most 2 * K * 2**-24 * sum(|x * W|) and one unit in the last place. Beyond the token counts in `choices`
          the op calls the BLAS, and nothing differs.
Pays      at the token counts that a table of measurements lists (`compiler/tuning`): the weight is read closer to the memory
          bandwidth. The op selects its kernel when it runs, that is, when a CUDA graph of one token count is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import DevicePass, GraphPass, Mismatch, PassResult, near_misses_by_reason
from torchweave.compiler.passes.rewrite import replace_call
from torchweave.compiler.passes.torch_ir.merge_linears import LINEAR, unsupported_weight
from torchweave.compiler.tuning.linears import LinearShape
from torchweave.compiler.tuning.table import Table, device_kind, shipped_table
from torchweave.ops.linear_config import supported


class SmallLinears(DevicePass):
    """See the module's text.

    Args:
        devices: device types on which linears are replaced; on others the op is its reference, which only tests use.
        table: measurements; None: the table shipped for the device.
    """

    name = "small_linears"

    def __init__(self, devices: Iterable[str] = ("cuda",), table: Table | None = None) -> None:
        super().__init__(devices)
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
        return PassResult(matches, matches, near_misses_by_reason(rejected))


def _replace(graph: CapturedGraph, node: fx.Node, table: Table | None) -> str | None:
    """Replace a linear by the op; return the reason when it is left unchanged."""
    try:
        x, weight, bias = GraphPass.bind(node, "input", "weight", bias=None)
    except Mismatch as mismatch:
        return str(mismatch)
    why = _reject_reason(graph, x, weight, bias)
    if why is not None:
        return why
    op, w = torch.ops.torchweave.linear.default, value(weight)
    choices = linear_choices(w, table)
    if not choices:
        return f"for {describe_weight(w)} the BLAS measured fastest"
    return replace_call(graph, node, op, (x, weight, bias, choices))


def linear_choices(weight: Tensor, table: Table | None, fused: str = "") -> str:
    """Kernel choices of the op for a weight, empty where the BLAS measured fastest; `fused`: letters of the fused parts."""
    table = shipped_table(device_kind(weight.device)) if table is None else table
    return LinearShape(weight.shape[0], weight.shape[1], fused).choices(table, weight.dtype)


def describe_weight(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"


def _reject_reason(graph: CapturedGraph, x: Any, weight: Any, bias: Any) -> str | None:
    """Why the op does not support the arguments, or has only the BLAS for them; else None."""
    if (why := unsupported_weight(graph, weight, bias)) is not None:
        return why
    w, b = value(weight), graph.constant(bias)
    if b is not None and (b.shape != w.shape[:1] or not b.is_contiguous()):
        return "its bias is not contiguous with one number a row"
    *batch, tokens, _ = (1, *value(x).shape)
    if not isinstance(tokens, torch.SymInt):
        return f"its token count is fixed at {tokens}"
    if any(isinstance(size, torch.SymInt) or size != 1 for size in batch):
        return "its tokens are in more than one dimension"
    if not supported(w.shape[0], w.shape[1], w.dtype):
        return f"for {describe_weight(w)} the op has no kernel but the BLAS"
    return None
