"""A graph's nodes as plain tuples: a pickler writes and reads those in C, and nodes one by one in Python.

    call(linear, (x, weight, None)) -> (2, "linear_3", ("(", ("%", 4), ("%", 1), None), ("{",))

Node 2 of a table graph, which holds each distinct operation once, says that this is a call of `linear`. Inputs and calls of
methods have their names in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

NodeRow = tuple[int | str, str, str, Any, Any]
_NAMED = ("placeholder", "call_method", "output")  # their targets are strings


def flatten_nodes(module: fx.GraphModule) -> tuple[fx.GraphModule, list[NodeRow]]:
    """The distinct operations of a module's graph, and its nodes as `(operation, kind, name, args, kwargs)`, without metadata."""
    table, numbers, rows = fx.Graph(), dict[Any, int](), list[NodeRow]()
    anything = table.placeholder("anything")
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target: int | str = str(node.target)
        if node.op not in _NAMED:
            target = numbers.setdefault((node.op, node.target), len(table.nodes))
            if target == len(table.nodes):
                table.node_copy(node, lambda _: anything).meta = {}
        rows.append((target, node.op, node.name, _write(node.args, places), _write(node.kwargs, places)))
    table.output(anything)  # a graph of methods alone has no other node, and without one its code is no Python
    return fx.GraphModule(module, table, "Captured"), rows


def unflatten_nodes(table: fx.GraphModule, rows: Sequence[NodeRow]) -> fx.GraphModule:
    """The module of which `flatten_nodes` made this."""
    targets = [node.target for node in table.graph.nodes]
    graph, nodes = fx.Graph(), list[fx.Node]()
    for target, kind, name, args, kwargs in rows:
        called = targets[target] if isinstance(target, int) else target
        nodes.append(graph.create_node(kind, called, _read(args, nodes), _read(kwargs, nodes), name))
    return _LazyGraphModule(table, graph, "Captured")


def _write(thing: Any, places: Mapping[fx.Node, int]) -> Any:
    """A tuple that begins with what it stands for, or a leaf that is no tuple."""
    if isinstance(thing, fx.Node):
        return ("%", places[thing])
    if isinstance(thing, tuple):
        return ("(", *[_write(item, places) for item in thing])
    if isinstance(thing, list):
        return ("[", *[_write(item, places) for item in thing])
    if isinstance(thing, dict):
        return ("{", *[(key, _write(item, places)) for key, item in thing.items()])
    if isinstance(thing, slice):
        return (":", *[_write(item, places) for item in (thing.start, thing.stop, thing.step)])
    return thing


def _read(thing: Any, nodes: Sequence[fx.Node]) -> Any:
    if not isinstance(thing, tuple):
        return thing
    kind, *items = thing
    if kind == "%":
        return nodes[items[0]]
    if kind == "{":
        return {key: _read(item, nodes) for key, item in items}
    read = [_read(item, nodes) for item in items]
    if kind == ":":
        return slice(*read)
    return read if kind == "[" else tuple(read)
