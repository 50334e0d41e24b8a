"""A captured graph as text, equal for two graphs exactly when they run the same operations in the same order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.graph import CapturedGraph, Constant
from torchweave.compiler.ir.symbols import value

_SIZES = (torch.SymInt, torch.SymBool, torch.SymFloat)


def canonical(graph: CapturedGraph) -> list[str]:
    """One line per operation: target, arguments, and the geometry and storage of its result.

    Constants are named by source and identity, sizes by their expression over the caller's names (not by their node), and all
    other values by number.
    """
    names: dict[fx.Node, str] = {}
    storages: dict[int, int] = {}
    lines: list[str] = []

    def text(thing: Any) -> str:
        if isinstance(thing, fx.Node):
            return text(value(thing)) if isinstance(value(thing), _SIZES) else names[thing]
        if isinstance(thing, Tensor):
            where = storages.setdefault(thing.untyped_storage()._cdata, len(storages))
            geometry = text([thing.size(), thing.stride(), thing.storage_offset()])
            return f"{thing.dtype}@{thing.device}{geometry} in {where}"
        if isinstance(thing, _SIZES):
            expression = thing.node.expr
            known = {symbol: type(symbol)(graph.symbols[str(symbol)]) for symbol in expression.free_symbols}
            return str(expression.xreplace(known))
        if isinstance(thing, (tuple, list)):
            return f"({', '.join(map(text, thing))})"
        if isinstance(thing, dict):
            return f"({', '.join(f'{key}={text(item)}' for key, item in sorted(thing.items()))})"
        if isinstance(thing, slice):
            return f"[{text((thing.start, thing.stop, thing.step))}]"
        return repr(thing)

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            binding = graph.bindings[node.name]
            is_constant = isinstance(binding, Constant)
            names[node] = f"{binding.source} {id(binding.tensor)}" if is_constant else str(binding)
        elif not isinstance(value(node), _SIZES):
            names[node] = f"%{len(lines)}"
            lines.append(f"{node.op} {node.target} {text(node.args)} {text(node.kwargs)} -> {text(value(node))}")
    return lines
