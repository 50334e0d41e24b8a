"""Put each repeated layer into the graph: a clone of the nodes that tracing made of the first layer of its kind."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compile.fakes import FakeStorages
from torchweave.compile.graph import CapturedGraph, Constant, run_fake, same_geometry
from torchweave.compile.mutation import storage
from torchweave.compile.sources import SourceError, resolve
from torchweave.compile.symbols import value
from torchweave.compile.trace_once.layers import Layer
from torchweave.compile.trace_once.stand_in import Kind, begin, end, stand_in
from torchweave.compile.trace_once.watch import Record, own_tensors


class Unstitchable(Exception):
    """The graph is not what was watched; the message says where they differ."""


@dataclass(frozen=True)
class _Traced:
    """The nodes of the layer that was traced."""

    layer: Layer
    record: Record
    body: list[fx.Node]
    arguments: list[fx.Node]
    results: list[fx.Node]

    @cached_property
    def outside(self) -> set[int | None]:
        """The storages that the layer reads and has not made."""
        inside = set(self.body)
        return {storage(node) for reader in self.body for node in reader.all_input_nodes if node not in inside}

    @cached_property
    def names(self) -> dict[int, str]:
        """The layer's own tensors by identity."""
        return {id(tensor): name for name, tensor in reversed(own_tensors(self.layer.module).items())}


def stitch_layers(graph: CapturedGraph, meaning: Mapping[int, tuple[Kind, Layer]]) -> None:
    """Replace every stand-in by a clone of the first layer of its kind, and take out the marks.

    Raises:
        Unstitchable: what was traced is not what was watched; the graph is then of no use.
    """
    constants = _Constants(graph)
    traced: dict[int, _Traced] = {}
    opened: dict[int, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.target is begin:
            opened[node.args[0]] = node
        elif node.target is end:
            kind, layer = meaning[node.args[0]]
            traced[id(kind)] = _traced(kind, layer, opened.pop(node.args[0]), node)
        elif node.target is stand_in:
            kind, layer = meaning[node.args[0]]
            if id(kind) not in traced:
                raise Unstitchable(f"{layer.path} is called before {kind.first.path}")
            _Clone(graph, constants, traced[id(kind)], layer, kind).replace(node)
    for node in list(graph.graph.nodes):
        if node.target in (begin, end):
            graph.graph.erase_node(node)
    constants.in_order_of_use()


def _traced(kind: Kind, layer: Layer, first: fx.Node, last: fx.Node) -> _Traced:
    nodes = list(first.graph.nodes)
    body: list[fx.Node] = nodes[nodes.index(first) + 1 : nodes.index(last)]
    inside, results = set(body), list(last.args[1:])
    for node in body:
        leaks = any(user not in inside and user is not last for user in node.users)
        if leaks and node not in results and not isinstance(value(node), (torch.SymInt, torch.SymBool, torch.SymFloat)):
            raise Unstitchable(f"{layer.path} leaves a value behind that is not its result")
        if node.op not in ("call_function", "call_method", "get_attr"):
            raise Unstitchable(f"{layer.path} holds a node of kind {node.op}")
    _check_calls(kind.record, body)
    return _Traced(layer, kind.record, body, list(first.args[1:]), results)  # type: ignore[arg-type]


def _check_calls(record: Record, body: list[fx.Node]) -> None:
    """The n-th call of a custom op that was watched must be the n-th in the graph."""
    watched = {(name, time) for name, time, _ in record.numbers}
    found = Counter(str(op) for node in body if (op := _overload(node.target)) is not None)
    for name in {name for name, _ in watched}:
        if found[name] != sum(which == name for which, _ in watched):
            raise Unstitchable(f"{name} was watched another number of times than it was traced")


class _Constants:
    """The graph's constants by the tensor that they are."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._nodes = {id(constant.tensor): node for node, constant in graph.constants()}
        self._last = graph.placeholders()[-1]

    def node(self, tensor: Tensor, source: str, name: str) -> fx.Node:
        """The placeholder bound to `tensor`, made when there is none."""
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        with self._graph.graph.inserting_after(self._last):
            node = self._graph.graph.placeholder(name)
        node.target = node.name  # the graph's own name for it, where another one has that name already
        node.meta["example_value"] = self._graph.fake_mode.from_tensor(tensor, static_shapes=True)
        self._graph.bindings[node.name] = Constant(tensor, source)
        self._nodes[id(tensor)] = self._last = node
        return node

    def in_order_of_use(self) -> None:
        """Placeholders in the order in which tracing the whole module would have met them."""
        placeholders = self._graph.placeholders()
        place = {node: number for number, node in enumerate(self._graph.graph.nodes)}
        by_use = sorted(placeholders, key=lambda node: min((place[user] for user in node.users), default=0))
        anchor = next(node for node in self._graph.graph.nodes if node.op != "placeholder")
        for node in by_use:
            anchor.prepend(node)


class _Clone:
    """One more layer like the one that was traced."""

    def __init__(self, graph: CapturedGraph, constants: _Constants, traced: _Traced, layer: Layer, kind: Kind) -> None:
        self._graph, self._constants, self._traced, self._layer = graph, constants, traced, layer
        self._numbers = next(record.numbers for other, record in kind.others if other is layer)
        self._mine = own_tensors(layer.module)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._times: dict[str, int] = {}
        self._fakes = _FreshFakes(graph.fake_mode, traced.outside)

    def replace(self, node: fx.Node) -> None:
        """Put the clone where the stand-in is."""
        graph = self._graph.graph
        given: list[fx.Node] = list(node.args[2:])  # type: ignore[arg-type]
        if len(given) != len(self._traced.arguments):
            raise Unstitchable(f"{self._layer.path} is called with other arguments than {self._traced.layer.path}")
        for theirs, mine in zip(self._traced.arguments, given, strict=True):
            if self._copies.setdefault(theirs, mine) is not mine or not same_geometry(value(theirs), value(mine)):
                raise Unstitchable(f"{self._layer.path} is called with tensors of another kind")
        readers = list(node.users)
        for reader in readers:
            assert reader.target is operator.getitem, "results of an opaque call are unpacked"
            self._fakes.expect(value(self._traced.results[reader.args[1]]), value(reader))  # type: ignore[index]
        with graph.inserting_before(node):
            for theirs in self._traced.body:
                self._copy(theirs)
        for reader in readers:
            result = self._copies[self._traced.results[reader.args[1]]]  # type: ignore[index]
            if not same_geometry(value(result), value(reader)):
                raise Unstitchable(f"{self._layer.path} gives a result of another kind than was watched")
            reader.replace_all_uses_with(result)
            graph.erase_node(reader)
        graph.erase_node(node)

    def _copy(self, theirs: fx.Node) -> None:
        copy = self._graph.graph.node_copy(theirs, self._counterpart)
        copy.meta = dict(theirs.meta)
        self._renumber(theirs, copy)
        self._copies[theirs] = copy
        fake = self._fakes.like(value(theirs))
        if fake is _ALIASES:
            with self._graph.faking():
                fake = run_fake(copy, {})
        copy.meta["example_value"] = fake

    def _counterpart(self, node: fx.Node) -> fx.Node:
        """What stands for `node` in this layer."""
        if node in self._copies:
            return self._copies[node]
        tensor = self._graph.constant(node)
        name = self._traced.names.get(id(tensor)) if tensor is not None else None
        if name is None:  # a size, or a value from outside that both layers read
            return node
        binding = self._graph.bindings[node.name]
        assert isinstance(binding, Constant), "a tensor of the module is a constant"
        prefix = _source_of(self._traced.layer.path)
        if not binding.source.startswith(prefix):
            raise Unstitchable(f"{binding.source} is a tensor of {self._traced.layer.path}, but not read through it")
        within = binding.source.removeprefix(prefix)
        try:
            found = resolve(f"layer{within}", {"layer": self._layer.module})
        except SourceError as error:
            raise Unstitchable(str(error)) from error
        if found is not self._mine[name]:
            raise Unstitchable(f"{within} of {self._layer.path} is not {name}")
        source = _source_of(self._layer.path) + within
        return self._constants.node(found, source, _renamed(node, self._traced.layer, self._layer))

    def _renumber(self, theirs: fx.Node, copy: fx.Node) -> None:
        """Give a custom op the numbers that it has in this layer."""
        op = _overload(theirs.target)
        if op is None:
            return
        name = str(op)
        time = self._times[name] = self._times.get(name, -1) + 1
        for (which, when, index), number in self._numbers.items():
            before = self._traced.record.numbers[which, when, index]
            if (which, when) != (name, time) or number == before:
                continue
            if index < len(theirs.args):
                if theirs.args[index] != before:
                    raise Unstitchable(f"{name} has {theirs.args[index]} where {before} was watched")
                copy.update_arg(index, number)
            else:
                keyword = op._schema.arguments[index].name
                if theirs.kwargs.get(keyword) != before:
                    raise Unstitchable(f"{name} has no {keyword}={before}, which was watched")
                copy.update_kwarg(keyword, number)


_ALIASES = object()


class _FreshFakes:
    """Fake values for a clone: those of the traced layer again, in storages of their own."""

    def __init__(self, mode: Any, outside: set[int | None]) -> None:
        self._storages, self._outside = FakeStorages(mode), outside
        self._fresh: dict[int, Any] = {}

    def expect(self, theirs: Tensor, mine: Tensor) -> None:
        """Let `mine` stand for a result: what reads the stand-in has been given views of it."""
        where = theirs.untyped_storage()._cdata
        if where in self._outside:
            raise Unstitchable("a layer gives back what it was given, or a view of it")
        self._fresh[id(theirs)] = mine
        self._storages.adopt(mine, where)

    def like(self, thing: Any) -> Any:
        """A copy of a value of the traced layer; `_ALIASES` when it lives in something from outside."""
        if isinstance(thing, (tuple, list)):
            copies = [self.like(item) for item in thing]
            return _ALIASES if any(copy is _ALIASES for copy in copies) else type(thing)(copies)
        if not isinstance(thing, Tensor):
            return thing
        where = thing.untyped_storage()._cdata
        if where in self._outside:
            return _ALIASES
        if id(thing) not in self._fresh:
            self._fresh[id(thing)] = self._storages.make(thing, where)
        return self._fresh[id(thing)]


def _overload(target: Any) -> torch._ops.OpOverload | None:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target if isinstance(target, torch._ops.OpOverload) else None


def _source_of(path: str) -> str:
    """How tracing names the module at `path`."""
    return "L['self']" + "".join(f"._modules['{name}']" for name in path.split("."))


def _renamed(node: fx.Node, theirs: Layer, mine: Layer) -> str:
    """The placeholder's name as tracing would have made it, as far as it can be told."""
    old, new = (path.replace(".", "_modules_") for path in (theirs.path, mine.path))
    return node.name.replace(f"self_modules_{old}_", f"self_modules_{new}_", 1)


def _flat(thing: Any) -> list[Any]:
    return list(thing) if isinstance(thing, (tuple, list)) else [thing]
