"""Collectives of a graph: detection, process groups and message sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.mutation import op_overload
from torchweave.compiler.ir.symbols import free_symbols, size_at, value
from torchweave.ops.collectives.op import group_size


def op_schema(node: fx.Node) -> Any:
    """The schema of the op that a node calls; None for other nodes."""
    op = op_overload(node.target)
    return None if op is None else op._schema


def collective_group(node: fx.Node) -> str | None:
    """The name of a collective's process group; None for other nodes. An op with an argument `str group` is a collective."""
    schema = op_schema(node)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "group" and isinstance(argument.type, torch.StringType):
            group = node.args[index] if index < len(node.args) else node.kwargs.get("group")
            return None if group is None else str(group)
    return None


def num_ranks(graph: FakeGraph) -> int:
    """Size of the largest process group in a graph; 1 without collectives."""
    groups = {collective_group(node) for node in graph.graph.nodes} - {None}
    return max((group_size(str(group)) for group in groups), default=1)


def exchanges(piece: FakeGraph, symbols: Mapping[str, str]) -> list[dict[str, Any]]:
    """Count the collectives of a piece, equal ones together.

    Args:
        symbols: the caller's names of sizes, by symbol.

    Returns:
        For each: `op`, `group`, `calls`, `per` (the size that scales its message, "" for none) and `bytes`, one rank's
        message at a size of 1.
    """
    calls_by_key: Counter[tuple[str, str, str, int]] = Counter()
    for node in piece.graph.nodes:
        group = collective_group(node)
        sent = next((value(each) for each in node.all_input_nodes if isinstance(value(each), Tensor)), None)
        if group is not None and sent is not None:
            calls_by_key[(op_schema(node).name, group, *_message(sent, symbols))] += 1
    keys = ("op", "group", "per", "bytes")
    return [{**dict(zip(keys, key, strict=True)), "calls": calls} for key, calls in calls_by_key.items()]


def _message(sent: Tensor, symbols: Mapping[str, str]) -> tuple[str, int]:
    names = sorted(free_symbols(list(sent.shape)))
    return ", ".join(symbols.get(name, name) for name in names), size_at(sent.numel(), 1) * sent.dtype.itemsize
