"""Clone the nodes that tracing made of one layer for another layer that does the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from torchweave.compiler.capture.trace_once.layers import Layer
from torchweave.compiler.capture.trace_once.watch import Record, own_tensors
from torchweave.compiler.ir.fake_tensors import FakeTensorFactory, TensorGeometry, geometry
from torchweave.compiler.ir.graph import CapturedGraph, Constant, run_fake, same_geometry
from torchweave.compiler.ir.mutation import storage_id
from torchweave.compiler.ir.sources import SourceError, resolve
from torchweave.compiler.ir.symbols import value

_NUMBERED = re.compile(r"_\d+$")


class CloneError(Exception):
    """The graph is not what was watched; the message says where they differ."""


@dataclass(frozen=True)
class Traced:
    """The nodes of a layer that was traced."""

    layer: Layer
    record: Record
    body: list[fx.Node]
    arguments: list[fx.Node]
    results: list[fx.Node]
    _patterns: dict[int, tuple[int, TensorGeometry]] = field(default_factory=dict)

    def pattern(self, fake: Tensor) -> tuple[int, TensorGeometry]:
        """The storage and the geometry of a value of a node: read once for all clones."""
        if id(fake) not in self._patterns:
            self._patterns[id(fake)] = (fake.untyped_storage()._cdata, TensorGeometry.of(fake))
        return self._patterns[id(fake)]

    @cached_property
    def outside(self) -> dict[int, list[fx.Node]]:
        """The storages that the layer reads and has not made, with the nodes by which it reads them."""
        inside, found = set(self.body), dict[int, list[fx.Node]]()
        for node in dict.fromkeys(node for reader in self.body for node in reader.all_input_nodes):
            if node not in inside and (where := storage_id(node)) is not None:
                found.setdefault(where, []).append(node)
        return found

    @cached_property
    def own(self) -> dict[int, str]:
        """The layer's own tensors by identity."""
        return {id(tensor): name for name, tensor in reversed(own_tensors(self.layer.module).items())}

    @cached_property
    def names(self) -> list[str]:
        """What the clones of each node are called before they are numbered. A number that is taken would be counted up from 1."""
        return [_NUMBERED.sub("", node.name) for node in self.body]

    @cached_property
    def layer_numbers(self) -> dict[fx.Node, tuple[str, int, list[int]]]:
        """The custom ops that take a number which may be another one in another layer: the op, which call of it, which arguments.

        Raises:
            CloneError: the n-th call that was watched is not the n-th in the graph.
        """
        wanted: dict[str, dict[int, list[int]]] = {}
        for name, time, index in self.record.numbers:
            wanted.setdefault(name, {}).setdefault(time, []).append(index)
        seen: Counter[str] = Counter()
        found: dict[fx.Node, tuple[str, int, list[int]]] = {}
        for node in self.body:
            name = str(_overload(node.target)) if _overload(node.target) is not None else ""
            if name in wanted:
                found[node] = (name, seen[name], wanted[name].get(seen[name], []))
                seen[name] += 1
        for name, calls in wanted.items():
            if len(calls) != seen[name]:
                raise CloneError(f"{name} was watched another number of times than it was traced")
        return found


class Constants:
    """The graph's constants by the tensor that they are."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._nodes = {id(constant.tensor): node for node, constant in graph.constants()}
        self._last = graph.placeholders()[-1]
        self._storages = FakeTensorFactory(graph.fake_mode)
        for node, constant in graph.constants():
            self._storages.bind_storage(value(node), constant.tensor.untyped_storage()._cdata)

    def node(self, tensor: Tensor, source: str, name: str, like: Tensor) -> fx.Node:
        """The placeholder bound to `tensor`, made when there is none.

        Args:
            like: a fake tensor of its geometry.
        """
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        with self._graph.graph.inserting_after(self._last):
            node = self._graph.graph.placeholder(name)
        node.target = node.name  # the graph's own name for it, where another one has that name already
        node.meta["example_value"] = (
            self._storages.make(like, tensor.untyped_storage()._cdata)
            if isinstance(like, FakeTensor)
            else self._graph.fake_mode.from_tensor(tensor, static_shapes=True)
        )
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


class Clone:
    """One more layer like the one that was traced.

    Args:
        record: what it does.
    """

    def __init__(
        self, graph: CapturedGraph, constants: Constants, traced: Traced, layer: Layer, record: Record
    ) -> None:
        self._graph, self._constants, self._traced, self._layer = graph, constants, traced, layer
        self._numbers = record.numbers
        self._own = own_tensors(layer.module)
        self._copies: dict[fx.Node, Any] = {}
        self._fakes = _FreshFakes(graph.fake_mode, traced, self._counterpart)

    def write(self, given: Sequence[fx.Node], expected: Mapping[int, Any]) -> list[fx.Node]:
        """Put the layer at the graph's insert point.

        Args:
            given: what it takes.
            expected: fake values that results of it have already, by the result's index.

        Returns:
            Its results.
        """
        traced = self._traced
        if len(given) != len(traced.arguments):
            raise CloneError(f"{self._layer.path} is called with other arguments than {traced.layer.path}")
        for theirs, mine in zip(traced.arguments, given, strict=True):
            if self._copies.setdefault(theirs, mine) is not mine or not _alike(value(theirs), value(mine)):
                raise CloneError(f"{self._layer.path} is called with tensors of another kind")
        for index, fake in expected.items():
            self._fakes.expect(value(traced.results[index]), fake)
        for node, name in zip(traced.body, traced.names, strict=True):
            self._copy(node, name)
        results = [self._copies[node] for node in traced.results]
        if any(not _alike(value(results[index]), fake) for index, fake in expected.items()):
            raise CloneError(f"{self._layer.path} gives a result of another kind than was watched")
        return results

    def _copy(self, theirs: fx.Node, name: str) -> None:
        args, kwargs = map_arg((theirs.args, theirs.kwargs), self._counterpart)
        copy = self._graph.graph.create_node(theirs.op, theirs.target, args, kwargs, name, theirs.type)
        copy.meta = dict(theirs.meta)
        if theirs in self._traced.layer_numbers:
            self._renumber(theirs, copy)
        self._copies[theirs] = copy
        fake = self._fakes.like(value(theirs))
        if fake is _UNKNOWN:
            with self._graph.enable_fake_mode():
                fake = run_fake(copy, {})
        copy.meta["example_value"] = fake

    def _counterpart(self, node: fx.Node) -> fx.Node:
        """What stands for `node` in this layer."""
        if node not in self._copies:
            self._copies[node] = self._constant_like(node)
        return self._copies[node]

    def _constant_like(self, node: fx.Node) -> fx.Node:
        """This layer's own tensor where `node` is one of the traced layer; else `node`, which both layers read."""
        tensor = self._graph.constant(node)
        name = self._traced.own.get(id(tensor)) if tensor is not None else None
        if name is None:
            return node
        binding = self._graph.bindings[node.name]
        assert isinstance(binding, Constant), "a tensor of the module is a constant"
        prefix = _source_of(self._traced.layer.path)
        if not binding.source.startswith(prefix):
            raise CloneError(f"{binding.source} is a tensor of {self._traced.layer.path}, but not read through it")
        within = binding.source.removeprefix(prefix)
        try:
            found = resolve(f"layer{within}", {"layer": self._layer.module})
        except SourceError as error:
            raise CloneError(str(error)) from error
        if found is not self._own[name]:
            raise CloneError(f"{within} of {self._layer.path} is not {name}")
        source = _source_of(self._layer.path) + within
        return self._constants.node(found, source, _renamed(node, self._traced.layer, self._layer), value(node))

    def _renumber(self, theirs: fx.Node, copy: fx.Node) -> None:
        """Give a custom op the numbers that it has in this layer."""
        name, time, indices = self._traced.layer_numbers[theirs]
        for index in indices:
            before, number = self._traced.record.numbers[name, time, index], self._numbers[name, time, index]
            if number == before:
                continue
            if index < len(theirs.args):
                if theirs.args[index] != before:
                    raise CloneError(f"{name} has {theirs.args[index]} where {before} was watched")
                copy.update_arg(index, number)
            else:
                op = _overload(theirs.target)
                assert op is not None, "only custom ops are numbered"
                keyword = op._schema.arguments[index].name
                if theirs.kwargs.get(keyword) != before:
                    raise CloneError(f"{name} has no {keyword}={before}, which was watched")
                copy.update_kwarg(keyword, number)


_UNKNOWN = object()


class _FreshFakes:
    """Fake values for a clone: those of the traced layer again, in storages of their own or in those that it is given.

    Args:
        counterpart: what stands in the clone for a node outside the traced layer.
    """

    def __init__(self, mode: Any, traced: Traced, counterpart: Any) -> None:
        self._storages, self._traced, self._counterpart = FakeTensorFactory(mode), traced, counterpart
        self._given: dict[int, Tensor | None] = {}
        self._fresh: dict[int, Any] = {}

    def expect(self, theirs: Tensor, mine: Tensor) -> None:
        """Let `mine` stand for a result: what reads the stand-in has been given views of it."""
        where = theirs.untyped_storage()._cdata
        if where in self._traced.outside:
            raise CloneError("a layer gives back what it was given, or a view of it")
        self._fresh[id(theirs)] = mine
        self._storages.bind_storage(mine, where)

    def like(self, thing: Any) -> Any:
        """A copy of a value of the traced layer; `_UNKNOWN` when it has to be computed."""
        if isinstance(thing, (tuple, list)):
            copies = [self.like(item) for item in thing]
            return _UNKNOWN if any(copy is _UNKNOWN for copy in copies) else type(thing)(copies)
        if not isinstance(thing, Tensor):
            return thing
        if id(thing) not in self._fresh:
            where, pattern = self._traced.pattern(thing)
            if where in self._traced.outside and not self._is_given(where, thing):
                return _UNKNOWN
            self._fresh[id(thing)] = self._storages.make_as(pattern, where)
        return self._fresh[id(thing)]

    def _is_given(self, where: int, thing: Tensor) -> bool:
        """Whether a view of what the traced layer is given can be the same view of what the clone is given."""
        if where not in self._given:
            mine = [value(self._counterpart(node)) for node in self._traced.outside[where]]
            one = len({fake.untyped_storage()._cdata for fake in mine}) == 1
            self._given[where] = mine[0] if one else None
            if one:
                self._storages.bind_storage(mine[0], where)
        base = self._given[where]
        return base is not None and base.dtype == thing.dtype


def _alike(one: Tensor, other: Tensor) -> bool:
    return geometry(one) == geometry(other) or same_geometry(one, other)


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
