"""Give Inductor slices whose indices are negative for some sizes only as indices from the beginning.

Before    slice(v, 0, -(T // 2), maxint)
After     slice(v, 0, max(0, min(T, -(T // 2) + T * min(1, max(0, T // 2)))), maxint)

When      the sign of the index differs between sizes: -(T // 2) is 0 for T = 1, where the slice is the whole of v. Inductor then
          expects a size that is known at run time only; the fake tensors have the expression above.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchweave.compiler.ir.symbols import value

aten = torch.ops.aten

_DIM = {aten.slice.Tensor: 1, aten.slice_scatter.default: 2}
"""Position of the dimension in a slice's arguments; start and end follow it."""


def resolve_slices(graph: fx.Graph) -> None:
    """See the module's text."""
    for node in list(graph.nodes):
        at = _DIM.get(node.target)
        if at is None:
            continue
        dim = node.args[at] if len(node.args) > at else 0
        for position in (at + 1, at + 2):
            if len(node.args) > position and _has_unknown_sign(node.args[position]):
                with graph.inserting_before(node):
                    node.update_arg(position, _resolve_index(node.args[0], dim, node.args[position]))


def _has_unknown_sign(index: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

    number = value(index) if isinstance(index, fx.Node) else None
    if not isinstance(number, torch.SymInt) or free_unbacked_symbols(number):
        return False
    return not statically_known_true(number >= 0) and not statically_known_true(number < 0)


def _resolve_index(tensor: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """Nodes of `size_relations.resolve_index`."""

    def call(target: Callable[..., Any], *args: Any) -> fx.Node:
        node = index.graph.call_function(target, args)
        node.meta["val"] = target(*(value(each) if isinstance(each, fx.Node) else each for each in args))
        return node

    size = call(aten.sym_size.int, tensor, dim)
    is_negative = call(torch.sym_min, 1, call(torch.sym_max, 0, call(operator.neg, index)))
    wrapped = call(operator.add, index, call(operator.mul, size, is_negative))
    return call(torch.sym_max, 0, call(torch.sym_min, size, wrapped))
