"""Hazards: which nodes of a piece must stay in order, whatever stream they run on.

Two nodes are ordered when one takes the other's value, or when both touch one storage, under whatever name, and at least one of
them writes: read after write, write after read, write after write. What meets other ranks counts as a write to all of them at
once: collectives stay in the graph's order, which is the same on every rank.
"""

from __future__ import annotations

from typing import Literal

from torch import fx

from torchweave.compiler.ir.aliasing import AliasInfo, computes_sizes

Hazard = Literal["value", "RAW", "WAR", "WAW"]
Edges = dict[tuple[fx.Node, fx.Node], frozenset[Hazard]]


def hazards(graph: fx.Graph, memory: AliasInfo) -> Edges:
    """Every pair of nodes that must stay in order, and why.

    Views only hand on, and touch no memory; one that is returned counts as a reader, as the caller is.
    """
    edges: dict[tuple[fx.Node, fx.Node], set[Hazard]] = {}
    last_write: dict[int, fx.Node] = {}
    readers: dict[int, list[fx.Node]] = {}

    def add(first: fx.Node | None, second: fx.Node, why: Hazard) -> None:
        if first is not None and first is not second:
            edges.setdefault((first, second), set()).add(why)

    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for argument in node.all_input_nodes:
            if argument.op != "placeholder":
                add(argument, node, "value")
        returned = any(user.op == "output" for user in node.users)
        if (node in memory.views and not returned) or computes_sizes(node):
            continue
        access = memory.access[node]
        for group in access.reads:
            add(last_write.get(group), node, "RAW")
        for group in access.writes:
            add(last_write.get(group), node, "WAW")
            for reader in readers.get(group, ()):
                add(reader, node, "WAR")
        for group in access.writes:
            last_write[group], readers[group] = node, []
        for group in access.reads - access.writes:
            readers.setdefault(group, []).append(node)
    return {pair: frozenset(why) for pair, why in edges.items()}
