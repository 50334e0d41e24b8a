"""Capture each repeated layer as one opaque node, a placeholder, and replace it by a clone of the first layer of its kind.

The first layer of each kind is traced between two marks; the others are only called. The classes of the layers' instances are
exchanged inside a `with`; nothing else of them changes.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from torchweave.compiler.capture.trace_once.layer_recorder import LayerRecord, own_tensors
from torchweave.compiler.capture.trace_once.repeated_layers import Layer, LayerKind
from torchweave.compiler.ir.fake_tensors import FakeTensorFactory, TensorGeometry
from torchweave.compiler.ir.graph import CapturedGraph, Constant, SourceError, resolve, run_fake, same_geometry
from torchweave.compiler.ir.mutation import op_overload, storage_id
from torchweave.compiler.ir.symbols import SYMBOLIC, value

_NUMBERED = re.compile(r"_\d+$")


class CloneError(Exception):
    """The graph differs from the recorded run; the message says where."""


def clone_layers(graph: CapturedGraph, placeholders: PlaceholderMap) -> None:
    """Replace every placeholder by clones of the first layers of their kinds, and erase the marks.

    Raises:
        CloneError: the graph differs from the recorded run, and is unusable afterwards.
    """
    constants, traced = _Constants(graph), dict[int, _TracedLayer]()
    begins: dict[int, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.target is begin:
            begins[node.args[0]] = node
        elif node.target is end:
            kind, layer, _ = placeholders[node.args[0]]
            traced[id(kind)] = _traced_layer(kind, layer, begins.pop(node.args[0]), node)
        elif node.target is layer_placeholder:
            kind, layer, record = placeholders[node.args[0]]
            if id(kind) not in traced:
                raise CloneError(f"{layer.path} is called before {kind.first.path}")
            _replace(graph, node, _Clone(graph, constants, traced[id(kind)], layer, record))
    for node in list(graph.graph.nodes):
        if node.target in (begin, end):
            graph.graph.erase_node(node)
    constants.sort_by_use()


def _replace(graph: CapturedGraph, node: fx.Node, clone: _Clone) -> None:
    """Replace a placeholder by the layer that it stands for."""
    readers = list(node.users)
    assert all(reader.target is operator.getitem for reader in readers), "results of an opaque call are unpacked"
    expected: dict[Any, Any] = {reader.args[1]: value(reader) for reader in readers}
    with graph.graph.inserting_before(node):
        results = clone.write(node.args[2:], expected)  # type: ignore[arg-type]
    for reader in readers:
        reader.replace_all_uses_with(results[reader.args[1]])  # type: ignore[index]
        graph.graph.erase_node(reader)
    graph.graph.erase_node(node)


@dataclass(frozen=True)
class _TracedLayer:
    """The nodes of a layer that was traced."""

    layer: Layer
    record: LayerRecord
    body: list[fx.Node]
    arguments: list[fx.Node]
    results: list[fx.Node]
    _patterns: dict[int, tuple[int, TensorGeometry]] = field(default_factory=dict)

    def pattern(self, fake: Tensor) -> tuple[int, TensorGeometry]:
        """The storage and the geometry of a node's fake value, read once for all clones."""
        if id(fake) not in self._patterns:
            self._patterns[id(fake)] = (fake.untyped_storage()._cdata, TensorGeometry.of(fake))
        return self._patterns[id(fake)]

    @cached_property
    def outer_storages(self) -> dict[int, list[fx.Node]]:
        """The storages that the layer reads and does not create, with the nodes by which it reads them."""
        inside, readers = set(self.body), dict[int, list[fx.Node]]()
        for node in dict.fromkeys(node for reader in self.body for node in reader.all_input_nodes):
            if node not in inside and (storage := storage_id(node)) is not None:
                readers.setdefault(storage, []).append(node)
        return readers

    @cached_property
    def own(self) -> dict[int, str]:
        """The layer's own tensors by identity."""
        return {id(tensor): name for name, tensor in reversed(own_tensors(self.layer.module).items())}

    @cached_property
    def names(self) -> list[str]:
        """The names of the clones of each node without their numbers: fx counts a number that is taken up from 1."""
        return [_NUMBERED.sub("", node.name) for node in self.body]

    @cached_property
    def layer_numbers(self) -> dict[fx.Node, tuple[str, int, list[int]]]:
        """The custom ops with integers that may differ between layers: the op, the index of its call, and the arguments.

        Raises:
            CloneError: the numbers of calls differ between the graph and the record.
        """
        recorded: dict[str, dict[int, list[int]]] = {}
        for name, index_of_call, index in self.record.numbers:
            recorded.setdefault(name, {}).setdefault(index_of_call, []).append(index)
        num_calls: Counter[str] = Counter()
        numbered: dict[fx.Node, tuple[str, int, list[int]]] = {}
        for node in self.body:
            name = str(op_overload(node.target))
            if name in recorded:
                numbered[node] = (name, num_calls[name], recorded[name].get(num_calls[name], []))
                num_calls[name] += 1
        for name, calls in recorded.items():
            if len(calls) != num_calls[name]:
                raise CloneError(f"{name} was traced {num_calls[name]} times and recorded {len(calls)} times")
        return numbered


def _traced_layer(kind: LayerKind, layer: Layer, first: fx.Node, last: fx.Node) -> _TracedLayer:
    nodes = list(first.graph.nodes)
    body: list[fx.Node] = nodes[nodes.index(first) + 1 : nodes.index(last)]
    inside, results = set(body), list(last.args[1:])
    for node in body:
        leaks = any(user not in inside and user is not last for user in node.users)
        if leaks and node not in results and not isinstance(value(node), SYMBOLIC):
            raise CloneError(f"a value of {layer.path} that is not its result is read outside of it")
        if node.op not in ("call_function", "call_method", "get_attr"):
            raise CloneError(f"{layer.path} holds a node of kind {node.op}")
    return _TracedLayer(layer, kind.record, body, list(first.args[1:]), results)  # type: ignore[arg-type]


class _Constants:
    """The placeholders of the graph's constants, by tensor."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._nodes = {id(constant.tensor): node for node, constant in graph.constants()}
        self._last = graph.placeholders()[-1]
        self._storages = FakeTensorFactory(graph.fake_mode)
        for node, constant in graph.constants():
            self._storages.bind_storage(value(node), constant.tensor.untyped_storage()._cdata)

    def node(self, tensor: Tensor, source: str, name: str, like: Tensor) -> fx.Node:
        """The placeholder bound to `tensor`, created on first use.

        Args:
            like: a fake tensor of its geometry.
        """
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        with self._graph.graph.inserting_after(self._last):
            node = self._graph.graph.placeholder(name)
        node.target = node.name  # the graph renames a placeholder whose name is taken
        node.meta["example_value"] = (
            self._storages.make(like, tensor.untyped_storage()._cdata)
            if isinstance(like, FakeTensor)
            else self._graph.fake_mode.from_tensor(tensor, static_shapes=True)
        )
        self._graph.bindings[node.name] = Constant(tensor, source)
        self._nodes[id(tensor)] = self._last = node
        return node

    def sort_by_use(self) -> None:
        """Sort the placeholders by their first use, as a trace of the whole module would."""
        placeholders = self._graph.placeholders()
        position = {node: number for number, node in enumerate(self._graph.graph.nodes)}
        by_use = sorted(placeholders, key=lambda node: min((position[user] for user in node.users), default=0))
        anchor = next(node for node in self._graph.graph.nodes if node.op != "placeholder")
        for node in by_use:
            anchor.prepend(node)


class _Clone:
    """One layer, cloned from the traced layer of its kind.

    Args:
        record: of the layer to be written.
    """

    def __init__(
        self, graph: CapturedGraph, constants: _Constants, traced: _TracedLayer, layer: Layer, record: LayerRecord
    ) -> None:
        self._graph, self._constants, self._traced, self._layer = graph, constants, traced, layer
        self._numbers = record.numbers
        self._own = own_tensors(layer.module)
        self._copies: dict[fx.Node, Any] = {}
        self._fakes = _FreshFakes(graph.fake_mode, traced, self._counterpart)

    def write(self, given: Sequence[fx.Node], expected: Mapping[int, Any]) -> list[fx.Node]:
        """Write the layer at the graph's insert point.

        Args:
            given: its arguments.
            expected: fake values that some of its results have already, by the result's index.

        Returns:
            Its results.
        """
        traced = self._traced
        if len(given) != len(traced.arguments):
            raise CloneError(f"{self._layer.path} is called with other arguments than {traced.layer.path}")
        for traced_arg, own_arg in zip(traced.arguments, given, strict=True):
            if self._copies.setdefault(traced_arg, own_arg) is not own_arg or not same_geometry(
                value(traced_arg), value(own_arg)
            ):
                raise CloneError(f"{self._layer.path} is called with tensors of another geometry")
        for index, fake in expected.items():
            self._fakes.expect(value(traced.results[index]), fake)
        for node, name in zip(traced.body, traced.names, strict=True):
            self._copy(node, name)
        results = [self._copies[node] for node in traced.results]
        if any(not same_geometry(value(results[index]), fake) for index, fake in expected.items()):
            raise CloneError(f"a result of {self._layer.path} has another geometry than its placeholder")
        return results

    def _copy(self, traced_node: fx.Node, name: str) -> None:
        args, kwargs = map_arg((traced_node.args, traced_node.kwargs), self._counterpart)
        copy = self._graph.graph.create_node(traced_node.op, traced_node.target, args, kwargs, name, traced_node.type)
        copy.meta = dict(traced_node.meta)
        if traced_node in self._traced.layer_numbers:
            self._renumber(traced_node, copy)
        self._copies[traced_node] = copy
        fake = self._fakes.like(value(traced_node))
        if fake is _UNKNOWN:
            with self._graph.enable_fake_mode():
                fake = run_fake(copy, {})
        copy.meta["example_value"] = fake

    def _counterpart(self, node: fx.Node) -> fx.Node:
        """The node of this layer that corresponds to `node` of the traced layer."""
        if node not in self._copies:
            self._copies[node] = self._constant_like(node)
        return self._copies[node]

    def _constant_like(self, node: fx.Node) -> fx.Node:
        """This layer's own tensor when `node` is one of the traced layer's own; else `node`, which both layers read."""
        tensor = self._graph.constant(node)
        name = self._traced.own.get(id(tensor)) if tensor is not None else None
        if name is None:
            return node
        binding = self._graph.bindings[node.name]
        assert isinstance(binding, Constant), "a tensor of the module is a constant"
        prefix = _source_of(self._traced.layer.path)
        if not binding.source.startswith(prefix):
            raise CloneError(f"{binding.source} is a tensor of {self._traced.layer.path}, but not read through it")
        suffix = binding.source.removeprefix(prefix)
        try:
            counterpart = resolve(f"layer{suffix}", {"layer": self._layer.module})
        except SourceError as error:
            raise CloneError(str(error)) from error
        if counterpart is not self._own[name]:
            raise CloneError(f"{suffix} of {self._layer.path} is not {name}")
        source = _source_of(self._layer.path) + suffix
        new_name = _renamed(node, self._traced.layer, self._layer)
        return self._constants.node(counterpart, source, new_name, value(node))

    def _renumber(self, traced_node: fx.Node, copy: fx.Node) -> None:
        """Set the integers of a custom op to those of this layer."""
        name, index_of_call, indices = self._traced.layer_numbers[traced_node]
        for index in indices:
            where = (name, index_of_call, index)
            before, number = self._traced.record.numbers[where], self._numbers[where]
            if number == before:
                continue
            if index < len(traced_node.args):
                if traced_node.args[index] != before:
                    raise CloneError(f"{name} has {traced_node.args[index]} where {before} was recorded")
                copy.update_arg(index, number)
            else:
                op = op_overload(traced_node.target)
                assert op is not None, "only custom ops are numbered"
                keyword = op._schema.arguments[index].name
                if traced_node.kwargs.get(keyword) != before:
                    raise CloneError(f"{name} has no {keyword}={before}, which was recorded")
                copy.update_kwarg(keyword, number)


_UNKNOWN = object()


class _FreshFakes:
    """Fake values of a clone: those of the traced layer, in storages of their own or in given storages.

    Args:
        counterpart: maps a node outside the traced layer to the clone's node.
    """

    def __init__(self, mode: Any, traced: _TracedLayer, counterpart: Any) -> None:
        self._storages, self._traced, self._counterpart = FakeTensorFactory(mode), traced, counterpart
        self._bases: dict[int, Tensor | None] = {}
        self._fresh: dict[int, Any] = {}

    def expect(self, traced_result: Tensor, own_result: Tensor) -> None:
        """Use `own_result` as the value of a result: the readers of the placeholder hold views of it."""
        storage = traced_result.untyped_storage()._cdata
        if storage in self._traced.outer_storages:
            raise CloneError("a layer returns one of its inputs, or a view of one")
        self._fresh[id(traced_result)] = own_result
        self._storages.bind_storage(own_result, storage)

    def like(self, thing: Any) -> Any:
        """A copy of a value of the traced layer; `_UNKNOWN` when it has to be computed."""
        if isinstance(thing, (tuple, list)):
            copies = [self.like(item) for item in thing]
            return _UNKNOWN if any(copy is _UNKNOWN for copy in copies) else type(thing)(copies)
        if not isinstance(thing, Tensor):
            return thing
        if id(thing) not in self._fresh:
            storage, pattern = self._traced.pattern(thing)
            if storage in self._traced.outer_storages and not self._has_base(storage, thing):
                return _UNKNOWN
            self._fresh[id(thing)] = self._storages.make_as(pattern, storage)
        return self._fresh[id(thing)]

    def _has_base(self, storage: int, thing: Tensor) -> bool:
        """Whether a view of an outer storage can be the same view of the clone's counterpart of that storage."""
        if storage not in self._bases:
            own_values = [value(self._counterpart(node)) for node in self._traced.outer_storages[storage]]
            is_single = len({fake.untyped_storage()._cdata for fake in own_values}) == 1
            self._bases[storage] = own_values[0] if is_single else None
            if is_single:
                self._storages.bind_storage(own_values[0], storage)
        base = self._bases[storage]
        return base is not None and base.dtype == thing.dtype


def _source_of(path: str) -> str:
    """Dynamo's source of the module at `path`."""
    return "L['self']" + "".join(f"._modules['{name}']" for name in path.split("."))


def _renamed(node: fx.Node, traced_layer: Layer, own_layer: Layer) -> str:
    """The placeholder's name for another layer, close to the name that tracing would choose."""
    old, new = (path.replace(".", "_modules_") for path in (traced_layer.path, own_layer.path))
    return node.name.replace(f"self_modules_{old}_", f"self_modules_{new}_", 1)


PlaceholderMap = dict[int, tuple[LayerKind, Layer, LayerRecord]]
"""The meaning of the numbers of marks and placeholders in a graph: a layer with its kind and its record."""


def begin(number: int, *tensors: Tensor) -> None:
    """Mark the begin of layer `number`, with its arguments."""


def end(number: int, *tensors: Tensor) -> None:
    """Mark the end of layer `number`, with its results."""


def layer_placeholder(number: int, like: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The call of layer `number`; result i has the geometry of argument `like[i]`."""
    return tuple(torch.empty_like(tensors[index]) for index in like)


@contextlib.contextmanager
def placeholder_layers(kinds: Sequence[LayerKind]) -> Iterator[PlaceholderMap]:
    """Replace the forwards of all layers but the first of each kind. Yields the meaning of the numbers in the graph."""
    from torch._dynamo import allow_in_graph

    for function in (begin, end, layer_placeholder):
        allow_in_graph(function)
    meanings: PlaceholderMap = {}
    with contextlib.ExitStack() as patches:
        for kind in kinds:
            for layer, record in ((kind.first, kind.record), *kind.others):
                number = len(meanings)
                meanings[number] = (kind, layer, record)
                forward = _traced_forward if layer is kind.first else _placeholder_forward
                patches.enter_context(_patched_forward(layer, forward(number, kind)))
        yield meanings


def _traced_forward(number: int, kind: LayerKind) -> Callable[..., Any]:
    """The first layer of a kind between its marks."""
    arguments, results = _tuple_of(kind.record.tensors, "args, kwargs"), _tuple_of(kind.record.outputs, "out")
    module = kind.first.module
    own = vars(module).get("forward")
    original = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(number, *arguments(args, kwargs))
        out = original(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        end(number, *results(out))
        return out

    return forward


def _placeholder_forward(number: int, kind: LayerKind) -> Callable[..., Any]:
    """A repeated layer as one call."""
    arguments, like = _tuple_of(kind.record.tensors, "args, kwargs"), kind.record.like
    rebuild = eval(f"lambda t: {kind.record.rebuild}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return rebuild(layer_placeholder(number, like, *arguments(args, kwargs)))

    return forward


def _tuple_of(expressions: Sequence[str], names: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of `names` that returns a tuple of the expressions, which are subscripts of those names alone."""
    return eval(f"lambda {names}: ({''.join(f'{item}, ' for item in expressions)})")


@contextlib.contextmanager
def _patched_forward(layer: Layer, forward: Callable[..., Any]) -> Iterator[None]:
    """Give the layer another forward: by a subclass for this one instance, or, where the instance has a forward of its own,
    as that (it may call the forward of its class)."""
    module, original = layer.module, type(layer.module)
    own = vars(module).get("forward")
    if own is not None:
        module.forward = MethodType(forward, module)
    else:
        body = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        module.__class__ = subclass = type(original.__name__, (original,), body)
        subclass.forward = forward  # set last: a base class may wrap the forward that a new class defines
    try:
        yield
    finally:
        module.__class__ = original
        if own is not None:
            module.forward = own
