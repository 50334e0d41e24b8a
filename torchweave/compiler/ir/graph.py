"""The captured graph: one FX graph of Torch IR, and the binding of each of its placeholders."""

from __future__ import annotations

import ast
import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.node import map_arg

from torchweave.compiler.ir.fake_tensors import FakeOpCache, FakeTensorFactory, geometry, run_target
from torchweave.compiler.ir.symbols import SYMBOLIC, expression, symbol_name, value


@dataclass(frozen=True)
class Input:
    """A placeholder that is one of forward's arguments."""

    name: str


@dataclass(frozen=True)
class Attribute(Input):
    """A returned attribute of an argument, such as `x.T`, which tracing keeps outside of the graph."""

    attribute: str


@dataclass(frozen=True)
class UnusedInput:
    """An argument of forward that no operation reads; the graph may still depend on its dtype, device and sizes.

    Attributes:
        sizes: a number, or the name of a dynamic size, for each dimension.
    """

    name: str
    dtype: torch.dtype
    device: str
    sizes: tuple[int | str, ...]


@dataclass(frozen=True)
class Size:
    """A placeholder that is a size of one of forward's arguments."""

    input: str
    dim: int


@dataclass(frozen=True)
class Constant:
    """A placeholder that is a parameter, a buffer or another tensor of the module, bound when the module is compiled.

    Attributes:
        tensor: the module's own object, so that a pass can move it into other storage.
        source: Dynamo's expression for it over the frame's locals `L` or globals `G`; "" for a tensor made by a pass.
    """

    tensor: Tensor
    source: str = ""


Binding = Input | Size | Constant


@dataclass(frozen=True)
class OutputTree:
    """How forward's return value is built from the graph's flat outputs.

    `leaves` holds for each leaf of `spec` the index of a graph output, an `Input` or `Attribute`, a `Constant`, or a plain
    Python constant.
    """

    spec: Any
    leaves: tuple[Any, ...]

    def is_single_tensor(self) -> bool:
        return self.spec.is_leaf() and self.leaves == (0,)


class FakeGraph:
    """A graph module whose nodes hold fake values: the input of every pass."""

    module: fx.GraphModule

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def fake_mode(self) -> Any:
        for node in self.graph.nodes:
            mode = getattr(value(node), "fake_mode", None)
            if mode is not None:
                return mode
        raise AssertionError("a graph holds at least one tensor")

    @contextlib.contextmanager
    def enable_fake_mode(self) -> Iterator[None]:
        """Run ops on fake values. Composite ops are decomposed in Python, since C++ cannot read a symbolic size."""
        with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
            yield

    @contextlib.contextmanager
    def without_guards(self) -> Iterator[None]:
        """Run operations on fake tensors without guards and without new symbols of sizes that depend on data.

        Another choice of a view or a copy is no error: torch makes it at each call.
        """
        shape_env = self.fake_mode.shape_env
        if shape_env is None:
            yield
            return
        with shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols():
            yield

    def num_calls(self) -> int:
        """Number of operations: every node but inputs and the output."""
        return sum(node.op.startswith("call") for node in self.graph.nodes)


@dataclass
class CapturedGraph(FakeGraph):
    """One graph of Torch IR over flat inputs.

    Attributes:
        module: holds the graph; every node's `meta["example_value"]` is its fake value.
        inputs: forward's parameter names, in order.
        bindings: by placeholder name.
        symbols: symbol of the graph -> the caller's name of it, such as `s72 -> T`.
        size_names: symbol -> the size as forward reads it, for messages: `s72 -> input_ids.shape[0]`.
        sources: importable names of the modules whose code was traced.
        unused_inputs: inputs without a placeholder.
        boundary_ops: names of the ops at which the graph will be split.
        splitting_ops: names of further ones, which the config lists.
        globals: names of the globals that the traced code reads, `module:name`; none for a graph from the cache.
        result_views: nodes after the last piece: views that forward returns, and sizes of tensors that these need.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    bindings: dict[str, Binding]
    output: OutputTree
    symbols: dict[str, str]
    size_names: dict[str, str]
    sources: tuple[str, ...] = ()
    unused_inputs: tuple[UnusedInput, ...] = ()
    boundary_ops: frozenset[str] = frozenset()
    splitting_ops: frozenset[str] = frozenset()
    globals: tuple[str, ...] = ()
    result_views: frozenset[fx.Node] = frozenset()

    @cached_property
    def fake_ops(self) -> FakeOpCache:
        """Cache of operations on this graph's fake values."""
        return FakeOpCache(self.fake_mode, self.enable_fake_mode)

    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def constants(self) -> Iterator[tuple[fx.Node, Constant]]:
        for node in self.placeholders():
            binding = self.bindings[node.name]
            if isinstance(binding, Constant):
                yield node, binding

    def constant(self, node: Any) -> Tensor | None:
        """The tensor that a constant's placeholder is bound to; None for any other node."""
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return None
        binding = self.bindings[node.name]
        return binding.tensor if isinstance(binding, Constant) else None

    def rebind_constant(self, node: fx.Node, storage: Tensor) -> None:
        """Move a constant, and with it the module's parameter, to other storage of the same shape and values."""
        binding = self.bindings[node.name]
        assert isinstance(binding, Constant), "only a constant can be moved"
        binding.tensor.data = storage

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of a function, or of a method by its name, with its fake value at the graph's insert point."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        node.meta["example_value"] = self.fake_ops.run(target, *fx.map_arg((args, kwargs), value))  # type: ignore[misc]
        return node

    def add_constant(self, name: str, tensor: Tensor) -> fx.Node:
        """Append a placeholder bound to `tensor`."""
        *_, last = self.placeholders()
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        node.meta["example_value"] = FakeTensorFactory(self.fake_mode).make(tensor, name)
        self.bindings[node.name] = Constant(tensor)
        return node

    def drop_unused_constants(self) -> None:
        for node in self.placeholders():
            if not node.users and isinstance(self.bindings[node.name], Constant):
                del self.bindings[node.name]
                self.graph.erase_node(node)


def clean_up_graph(graph: CapturedGraph) -> None:
    """Remove leftovers of tracing, and differences between equal pieces.

    Each size has one node; results of ops with several outputs are unpacked at the op, so that only tensors and sizes cross
    from one piece to the next.
    """
    nodes = graph.graph
    first: dict[str, fx.Node] = {}
    for node in list(nodes.nodes):
        name = symbol_name(value(node))
        if name is not None and first.setdefault(name, node) is not node:
            node.replace_all_uses_with(first[name])
    for node in list(nodes.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, fx.Node) and isinstance(value(source), (tuple, list)) and node.prev is not source:
                source.append(node)
    for node in reversed(list(nodes.nodes)):
        if _is_noise(node):
            nodes.erase_node(node)
    for node in graph.placeholders():
        if not node.users and not isinstance(graph.bindings[node.name], Input):
            del graph.bindings[node.name]
            nodes.erase_node(node)
    graph.module.recompile()


_NOISE = (
    torch._C._log_api_usage_once,
    torch._C._set_grad_enabled,
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
    torch._check,
    torch.ops.aten._assert_scalar.default,
    operator.ge,
    operator.eq,
    operator.le,
)
"""Calls without an effect on the results: no step has gradients."""


def _is_noise(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.users:
        return False
    if node.target in _NOISE:
        return True
    return isinstance(value(node), SYMBOLIC)


def update_fake_values(graph: CapturedGraph, changed: dict[fx.Node, Any], commit: bool = True) -> dict[fx.Node, Any]:
    """Recompute fake values downstream of changed nodes.

    Args:
        changed: nodes and their new fake values, in the graph's order.
        commit: store the values in the graph; False only checks that every reader can run on them.

    Returns:
        Every node whose geometry changed, with its new value. Raises whatever a reader raises that cannot run.
    """
    node = next(iter(changed))
    changed = dict(changed)
    stale = {reader for node in changed for reader in node.users} - changed.keys()
    while stale:  # readers follow their inputs: one walk forward, until no stale node is left
        node = node.next
        if node not in stale:
            continue
        stale.discard(node)
        if node.op == "output":
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: changed.get(arg, value(arg)))
        new = graph.fake_ops.run(_called(node), args, kwargs)
        if not same_geometry(new, value(node)):
            changed[node] = new
            stale.update(node.users)
    if commit:
        for node, new in changed.items():
            node.meta["example_value"] = new
    return changed


def run_fake(node: fx.Node, changed: dict[fx.Node, Any]) -> Any:
    """The result of a call on the fake values of its arguments, or on newer ones in `changed`; inside `enable_fake_mode()`."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: changed.get(arg, value(arg)))
    return run_target(_called(node), args, kwargs)


def _called(node: fx.Node) -> Callable[..., Any] | str:
    """The called function, or the name of the method."""
    if node.op == "call_method":
        return str(node.target)
    assert node.op == "call_function" and callable(node.target), f"{node.op} {node.target} has no fake value"
    return node.target


def same_geometry(one: Any, other: Any, *, ones: bool = True) -> bool:
    """Whether two fake values agree in type and `geometry`, those in tuples and lists one by one."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return geometry(one, ones) == geometry(other, ones)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(same_geometry(a, b, ones=ones) for a, b in zip(one, other, strict=True))
    return expression(one) == expression(other)


class SourceError(Exception):
    """The expression is more than a look-up, or looks up a missing object."""


def resolve(source: str, roots: Mapping[str, Any]) -> Any:
    """The object that Dynamo's `source` names, starting from `roots` (`L`: the frame's locals, `G`: its globals).

    A source is an expression such as `L['self']._modules['embed']._parameters['weight']`. Only names, attributes and constant
    subscripts are resolved, without `eval`, so that a source from the compile cache can look up objects and do nothing else.
    """
    try:
        return _walk(_parse(source), roots)
    except (SyntaxError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise SourceError(f"{source} does not exist ({type(error).__name__}: {error})") from error


@functools.lru_cache(maxsize=4096)
def _parse(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _walk(tree: ast.expr, roots: Mapping[str, Any]) -> Any:
    if isinstance(tree, ast.Name):
        return roots[tree.id]
    if isinstance(tree, ast.Attribute):
        return getattr(_walk(tree.value, roots), tree.attr)
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
        return _walk(tree.value, roots)[tree.slice.value]
    raise SourceError(f"{ast.unparse(tree)} is more than a look-up")
