"""Which calls of a graph are collectives, and what each of them exchanges with the other ranks of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, fx

from torchweave.compiler.ir.symbols import free_symbols, value
from torchweave.ops.collectives.op import group_size

if TYPE_CHECKING:
    from torchweave.compiler.ir.graph import FakeGraph


def op_schema(node: fx.Node) -> Any:
    """The schema of the op that a node calls; None where it calls no op."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def collective_group(node: fx.Node) -> str | None:
    """The name of the group of ranks that a call exchanges data with; None for what is no collective.

    An op that takes a `str group` is one: the schema says it, and no list has to be kept.
    """
    schema = op_schema(node)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "group" and isinstance(argument.type, torch.StringType):
            given = node.args[index] if index < len(node.args) else node.kwargs.get("group")
            return None if given is None else str(given)
    return None


def num_ranks(graph: FakeGraph) -> int:
    """How many ranks meet in a graph, at the most; 1 in one without collectives."""
    groups = {collective_group(node) for node in graph.graph.nodes} - {None}
    return max((group_size(str(group)) for group in groups), default=1)


def exchanges(piece: FakeGraph, symbols: Mapping[str, str]) -> list[dict[str, Any]]:
    """The collectives of a piece, equal ones counted.

    Args:
        symbols: the caller's names of sizes, by symbol.

    Returns:
        For each: `op`, `group`, `calls`, `per` (the size that its message grows with, "" for none) and `bytes`, the message of
        one rank when that size is one.
    """
    found: Counter[tuple[str, str, str, int]] = Counter()
    for node in piece.graph.nodes:
        group = collective_group(node)
        sent = next((value(each) for each in node.all_input_nodes if isinstance(value(each), Tensor)), None)
        if group is not None and sent is not None:
            found[(op_schema(node).name, group, *_message(sent, symbols))] += 1
    keys = ("op", "group", "per", "bytes")
    return [{**dict(zip(keys, key, strict=True)), "calls": calls} for key, calls in found.items()]


def _message(sent: Tensor, symbols: Mapping[str, str]) -> tuple[str, int]:
    names = sorted(free_symbols(list(sent.shape)))
    numel: Any = sent.numel()
    if isinstance(numel, torch.SymInt):
        expression = numel.node.expr
        numel = expression.xreplace({symbol: sympy.Integer(1) for symbol in expression.free_symbols})
    return ", ".join(symbols.get(name, name) for name in names), int(numel) * sent.dtype.itemsize
