"""Put each repeated layer into the graph: a clone of the nodes that tracing made of the first layer of its kind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchweave.compiler.capture.trace_once.clone import Clone, CloneError, Constants, Traced
from torchweave.compiler.capture.trace_once.found import Kind, PlaceholderMap, SkippedLayer, Tail, Wire
from torchweave.compiler.capture.trace_once.layers import Layer
from torchweave.compiler.capture.trace_once.placeholder import begin, end, layer_placeholder
from torchweave.compiler.capture.trace_once.watch import Record
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value


def stitch_layers(graph: CapturedGraph, placeholder_map: PlaceholderMap) -> None:
    """Replace every stand-in by clones of the first layers of their kinds, and take out the marks.

    Raises:
        CloneError: what was traced is not what was watched; the graph is then of no use.
    """
    stitcher = _Stitcher(graph, placeholder_map)
    opened: dict[int, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.target is begin:
            opened[node.args[0]] = node
        elif node.target is end:
            stitcher.mark(opened.pop(node.args[0]), node)
        elif node.target is layer_placeholder:
            stitcher.replace(node)
    for node in list(graph.graph.nodes):
        if node.target in (begin, end):
            graph.graph.erase_node(node)
    stitcher.constants.in_order_of_use()


class _Stitcher:
    """Goes through the graph in order, and knows what each layer so far takes and gives."""

    def __init__(self, graph: CapturedGraph, placeholder_map: PlaceholderMap) -> None:
        self.constants = Constants(graph)
        self._graph, self._meaning = graph, placeholder_map
        self._traced: dict[int, Traced] = {}
        self._arguments: dict[str, list[fx.Node]] = {}
        self._results: dict[str, list[fx.Node]] = {}

    def mark(self, first: fx.Node, last: fx.Node) -> None:
        """A layer that was traced stands between these marks."""
        meant = self._meaning[first.args[0]]  # type: ignore[index]
        assert not isinstance(meant, Tail), "tails have no marks"
        kind, layer = meant
        traced = self._traced[id(kind)] = _traced(kind, layer, first, last)
        self._arguments[layer.path], self._results[layer.path] = traced.arguments, traced.results

    def replace(self, node: fx.Node) -> None:
        """A layer, or the tail of a list, belongs where this stand-in is."""
        meant, given = self._meaning[node.args[0]], list(node.args[2:])  # type: ignore[index]
        readers = list(node.users)
        assert all(reader.target is operator.getitem for reader in readers), "results of an opaque call are unpacked"
        expected = {reader.args[1]: value(reader) for reader in readers}
        with self._graph.graph.inserting_before(node):
            if isinstance(meant, Tail):
                results = self._tail(meant, given, expected)
            else:
                kind, layer = meant
                record = next(record for other, record in kind.others if other is layer)
                results = self._clone(kind, layer, record, given, expected)
        for reader in readers:
            reader.replace_all_uses_with(results[reader.args[1]])  # type: ignore[index]
            self._graph.graph.erase_node(reader)
        self._graph.graph.erase_node(node)

    def _tail(self, tail: Tail, given: Sequence[Any], expected: dict[Any, Any]) -> list[fx.Node]:
        if list(given) != self._results.get(tail.last.path):
            raise CloneError(f"{tail.last.path} gives something else on than its results")
        *between, last = tail.skipped_layers
        for each in between:
            self._clone_left_out(each, {})
        return self._clone_left_out(last, expected)

    def _clone_left_out(self, each: SkippedLayer, expected: dict[Any, Any]) -> list[fx.Node]:
        return self._clone(each.kind, each.layer, each.record, [self._node(wire) for wire in each.given], expected)

    def _node(self, wire: Wire) -> fx.Node:
        what, path, index = wire
        return (self._results if what == "result" else self._arguments)[path][index]

    def _clone(
        self, kind: Kind, layer: Layer, record: Record, given: Sequence[Any], expected: dict[Any, Any]
    ) -> list[fx.Node]:
        if id(kind) not in self._traced:
            raise CloneError(f"{layer.path} is called before {kind.first.path}")
        results = Clone(self._graph, self.constants, self._traced[id(kind)], layer, record).write(given, expected)
        self._arguments[layer.path], self._results[layer.path] = list(given), results
        return results


def _traced(kind: Kind, layer: Layer, first: fx.Node, last: fx.Node) -> Traced:
    nodes = list(first.graph.nodes)
    body: list[fx.Node] = nodes[nodes.index(first) + 1 : nodes.index(last)]
    inside, results = set(body), list(last.args[1:])
    for node in body:
        leaks = any(user not in inside and user is not last for user in node.users)
        if leaks and node not in results and not isinstance(value(node), (torch.SymInt, torch.SymBool, torch.SymFloat)):
            raise CloneError(f"{layer.path} leaves a value behind that is not its result")
        if node.op not in ("call_function", "call_method", "get_attr"):
            raise CloneError(f"{layer.path} holds a node of kind {node.op}")
    return Traced(layer, kind.record, body, list(first.args[1:]), results)  # type: ignore[arg-type]
