"""Costs of nodes: measured microseconds, else a weight by kind of operation.

The weights are TensorRT-LLM's: 0 for a view, 10 for a matmul, 20 for a fused mixture of experts, 1 for all else. Next to
measured costs, a weight counts as microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.aliasing import op_name
from torchweave.compiler.ir.symbols import value

SHAPE, DEFAULT, MATMUL, EXPERTS = 0.0, 1.0, 10.0, 20.0
EVENT = 1.0
"""Cost of a wait for another stream, besides the waiting time."""

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_ZERO_COST_OPS = ALLOCATIONS | frozenset({
    "getitem", "size", "shape", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose",
    "permute", "t", "expand", "expand_as", "slice", "select", "split", "split_with_sizes", "chunk", "unbind",
    "detach", "alias", "as_strided",
})  # fmt: skip
_MATMULS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "convolution", "scaled_mm",
    "_scaled_mm", "grouped_mm", "_grouped_mm", "_scaled_grouped_mm", "scaled_dot_product_attention", "__matmul__",
})  # fmt: skip


def is_opaque(node: fx.Node) -> bool:
    """Whether Inductor runs the node as a separate kernel: a matmul or a custom op."""
    namespace, name = op_name(node)
    return name in _MATMULS or namespace not in ("", "aten", "prims")


def weight_of(node: fx.Node, is_view: bool) -> float:
    """TensorRT-LLM's weight of a node."""
    namespace, name = op_name(node)
    if is_view or name in _ZERO_COST_OPS:
        return SHAPE
    words = set(name.split("_")) if namespace else set()
    if words & {"experts", "moe"}:
        return EXPERTS
    return MATMUL if name in _MATMULS or words & {"linear", "mm", "gemm", "attention"} else DEFAULT


def key_of(node: fx.Node) -> str:
    """Key of a measured cost: the op, and dtype and shape of each tensor argument, with dynamic sizes as T."""
    return f"{'::'.join(filter(None, op_name(node)))}({', '.join(map(_kind, map(value, node.all_input_nodes)))})"


def _kind(thing: object) -> str:
    if not isinstance(thing, Tensor):
        return type(thing).__name__
    sizes = ",".join("T" if isinstance(size, torch.SymInt) else str(size) for size in thing.shape)
    return f"{str(thing.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True)
class Costs:
    """Costs of nodes and of tasks.

    Attributes:
        fused: count the pointwise operations of a task as one kernel, as Inductor fuses them.
        measured: microseconds by `key_of`; other nodes cost their weight.
    """

    fused: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)

    def of(self, nodes: tuple[fx.Node, ...], views: frozenset[fx.Node]) -> float:
        """Total cost of the nodes."""
        total, fusible = 0.0, 0.0
        for node in nodes:
            cost = self.measured.get(key_of(node)) if self.measured else None
            cost = weight_of(node, node in views) if cost is None else cost
            if self.fused and not is_opaque(node):
                fusible = max(fusible, cost)
            else:
                total += cost
        return total + fusible
