"""The collectives of a graph, and the data that each exchanges with the other ranks of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, fx

from torchweave.compiler.ir.mutation import op_overload
from torchweave.compiler.ir.symbols import free_symbols, value
from torchweave.ops.collectives.op import group_size

if TYPE_CHECKING:
    from torchweave.compiler.ir.graph import FakeGraph


def op_schema(node: fx.Node) -> Any:
    """The schema of the op that a node calls; None when it calls none."""
    op = op_overload(node.target)
    return None if op is None else op._schema


def collective_group(node: fx.Node) -> str | None:
    """The name of the group of ranks that a call exchanges data with; None when it is not a collective.

    Every op with an argument `str group` is a collective, so that no list of them is needed.
    """
    schema = op_schema(node)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "group" and isinstance(argument.type, torch.StringType):
            group = node.args[index] if index < len(node.args) else node.kwargs.get("group")
            return None if group is None else str(group)
    return None


def num_ranks(graph: FakeGraph) -> int:
    """The size of the largest group of ranks in a graph; 1 without collectives."""
    groups = {collective_group(node) for node in graph.graph.nodes} - {None}
    return max((group_size(str(group)) for group in groups), default=1)


def exchanges(piece: FakeGraph, symbols: Mapping[str, str]) -> list[dict[str, Any]]:
    """Count the collectives of a piece, equal ones together.

    Args:
        symbols: the caller's names of sizes, by symbol.

    Returns:
        For each: `op`, `group`, `calls`, `per` (the size that the message is proportional to, "" for none) and `bytes`, the
        message of one rank at size 1.
    """
    counts: Counter[tuple[str, str, str, int]] = Counter()
    for node in piece.graph.nodes:
        group = collective_group(node)
        sent = next((value(each) for each in node.all_input_nodes if isinstance(value(each), Tensor)), None)
        if group is not None and sent is not None:
            counts[(op_schema(node).name, group, *_message(sent, symbols))] += 1
    keys = ("op", "group", "per", "bytes")
    return [{**dict(zip(keys, key, strict=True)), "calls": calls} for key, calls in counts.items()]


def _message(sent: Tensor, symbols: Mapping[str, str]) -> tuple[str, int]:
    names = sorted(free_symbols(list(sent.shape)))
    numel: Any = sent.numel()
    if isinstance(numel, torch.SymInt):
        expression = numel.node.expr
        numel = expression.xreplace({symbol: sympy.Integer(1) for symbol in expression.free_symbols})
    return ", ".join(symbols.get(name, name) for name in names), int(numel) * sent.dtype.itemsize


def report_collectives(pieces: Sequence[Piece], symbols: Mapping[str, str], report: Report) -> None:
    """Record a `communication` event for each distinct piece with collectives."""
    num_uses = Counter(piece.digest for piece in pieces)
    for piece in {piece.digest: piece for piece in reversed(pieces)}.values():
        if messages := exchanges(piece, symbols):
            report.event("communication", piece=piece.digest, shared_by=num_uses[piece.digest], exchanges=messages)
