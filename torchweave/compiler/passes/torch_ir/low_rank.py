"""Add to each linear what the low-rank adapters (LoRA) of the step's requests add to it.

Before                                  After
    y = linear(x, W, b)                     y = linear(x, W, b)
                                            z = torchweave.low_rank(y, x, index, A, B)

When      W is the weight of a module that all its readers multiply by: `linear`, a transposed `addmm`, or the products of
          weights in FP8 and integers; x has the tokens of the step, or those whose logits are computed, as rows. The passes
          after this one merge the linears themselves; each part of a merged one keeps its op.
Numerics  exact: a row without an adapter keeps its bits; what an adapter adds is summed in float32 and rounded once.
Memory    A and B of each linear for as many adapters as the option `max_loras` says, at addresses that stay.
Pays      it adds work; without `enable_lora` it does not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

import torchweave.ops.quant.fp8
import torchweave.ops.quant.int8_linear
import torchweave.ops.quant.int_linear  # noqa: F401  (defines the ops)
from torchweave.compiler.ir.graph import CapturedGraph, Input
from torchweave.compiler.ir.symbols import expression, symbol_name, value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes.base import GraphPass, Mismatch, PassResult, near_misses_by_reason
from torchweave.compiler.passes.torch_ir.merge_linears import LINEAR
from torchweave.ops.low_rank import AdapterSlots

_LOW_RANK = torch.ops.torchweave.low_rank.default
_QUANT, _FP8 = torch.ops.torchweave.fp8_quant.default, torch.ops.torchweave.fp8_linear.default
_INT = (torch.ops.torchweave.int_linear.default, torch.ops.torchweave.int8_linear.default)


class _Product(NamedTuple):
    """A product by a weight: the call, its input `[..., K]`, and the placeholder of the weight."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node


class LowRankAdapters(GraphPass):
    """See the module's text.

    Args:
        slots: receives a place for each linear, and the reason for those without.
    """

    name = "low_rank_adapters"

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def run(self, graph: CapturedGraph) -> PassResult:
        rejected: dict[str, list[str]] = {}
        named = [(self._slots.linears.get(id(graph.constant(each.weight))), each) for each in _products(graph)]
        readers = {product.node for _, product in named}
        for name, product in named:
            if name is not None and (why := _reject_reason(graph, product, readers)):
                rejected.setdefault(why, []).append(product.node.name)
                self._slots.refusals[name] = why
        placed = [(name, product) for name, product in named if name is not None and name not in self._slots.refusals]
        if not placed:
            return PassResult(0, 0, near_misses_by_reason(rejected))
        index = graph.add_constant("adapter_index", self._slots.index)
        changed: dict[fx.Node, fx.Node] = {}
        for name, product in placed:
            x = changed.get(product.x, product.x)  # a linear may read another one directly
            changed[product.node] = self._add(graph, product._replace(x=x), name, index)
        return PassResult(len(placed), 0, near_misses_by_reason(rejected))

    def _add(self, graph: CapturedGraph, product: _Product, name: str, index: fx.Node) -> fx.Node:
        """Insert the op after a product, and return it."""
        fake, last = value(product.node), product.node
        place = self._slots.place(name, value(product.x).shape[-1], fake.shape[-1], fake.dtype)
        a, b = (graph.add_constant(f"adapter_{part}", getattr(place, part)) for part in ("a", "b"))
        if _rows(graph, product.x) == "N":
            with graph.graph.inserting_after(last):
                last = index = graph.call(torch.index_select, index, 0, _logits_index(graph))
        with graph.graph.inserting_after(last):
            added = graph.call(_LOW_RANK, product.node, product.x, index, a, b)
        product.node.replace_all_uses_with(added, lambda user: user is not added)
        return added


def _products(graph: CapturedGraph) -> Iterator[_Product]:
    """The products of the graph by weights of the module."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        try:
            if node.target is LINEAR:
                x, weight, _ = GraphPass.bind(node, "input", "weight", bias=None)
            elif node.target is torch.addmm:  # GPT-2's `Conv1D`, whose weight is [K, N]
                _, x, weight = GraphPass.bind(node, "input", "mat1", "mat2")
            else:
                continue
        except Mismatch:
            continue
        if graph.constant(weight) is not None and isinstance(x, fx.Node):
            yield _Product(node, x, weight)
    for node, (x, weight, *_) in calls_of(graph, *_INT):
        if graph.constant(weight) is not None:
            yield _Product(node, x, weight)
    sources = {part: x for node, (x, *_) in calls_of(graph, _QUANT) for part in node.users}
    for node, (quantized, _, weight, *_) in calls_of(graph, _FP8):
        if graph.constant(weight) is not None and quantized in sources:
            yield _Product(node, sources[quantized], weight)


def _reject_reason(graph: CapturedGraph, product: _Product, readers: set[fx.Node]) -> str:
    """Why a product takes no adapter, or an empty text."""
    if not readers.issuperset(product.weight.users):
        return "its weight is read by more than products"
    if _rows(graph, product.x) is None:
        return "its rows are not the tokens of a step"
    return ""


def _rows(graph: CapturedGraph, x: fx.Node) -> str | None:
    """The name of the number of rows: T for the tokens of a step, N for those whose logits are computed; None for others."""
    varying = [size for size in value(x).shape[:-1] if expression(size) != 1]
    name = graph.symbols.get(symbol_name(varying[0]) or "") if len(varying) == 1 else None
    return None if name not in ("T", "N") or (name == "N" and _logits_index(graph) is None) else name


def _logits_index(graph: CapturedGraph) -> fx.Node | None:
    for node in graph.placeholders():
        binding = graph.bindings[node.name]
        if type(binding) is Input and binding.name == "logits_index":
            return node
    return None
