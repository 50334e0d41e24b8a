"""Alias analysis: the storages that each node of a graph reads and writes, found by running the graph on fake tensors.

A storage and its views form one group. Inputs and constants form one group together unless they are known not to alias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.node import map_arg

from torchweave.compiler.ir.collectives import collective_group
from torchweave.compiler.ir.fake_tensors import run_target
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.ir.symbols import SYMBOLIC, value

# Functions whose result may or may not be a view of their argument, depending on the sizes.
_MAYBE_VIEWS = frozenset({
    "reshape", "reshape_as", "flatten", "unflatten", "ravel", "contiguous", "to", "type", "type_as", "float",
    "half", "bfloat16", "double", "int", "long", "bool", "expand", "expand_as", "dropout", "squeeze",
    "view_as_real", "resolve_conj", "resolve_neg", "real", "pad",
})  # fmt: skip
# Functions of Torch IR that draw from the random generator; ATen ops have a tag for it.
_RANDOM = frozenset({
    "dropout", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial",
    "normal",
})  # fmt: skip
_SIDE_EFFECTS = -1  # the group of everything but tensors: the random generator, assertions, the other ranks


class AliasAnalysisError(Exception):
    """The graph holds a node whose storage cannot be determined."""


@dataclass(frozen=True)
class NodeAccess:
    """The storage groups that a node reads, and those that it writes to in place.

    A new tensor is not a write: every access to its storage already depends on the node.
    """

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True)
class AliasInfo:
    """Storages of a graph and the accesses to them.

    Attributes:
        access: of every node but the output.
        holds: the storage groups of each node's tensors.
        views: nodes that only view their argument, which any reader can repeat.
    """

    access: dict[fx.Node, NodeAccess]
    holds: dict[fx.Node, frozenset[int]]
    views: frozenset[fx.Node]


def computes_sizes(node: fx.Node) -> bool:
    """Whether a node's value is a size or a shape."""
    leaves = list(_leaves(value(node)))
    return bool(leaves) and all(isinstance(each, (*SYMBOLIC, int, float)) for each in leaves)


def op_name(node: fx.Node) -> tuple[str, str]:
    """Namespace and name of the called op, without overload: `("aten", "add")`; a Python function has no namespace."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "higher_order", target.name()
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return namespace, name
    return "", target if isinstance(target, str) else getattr(target, "__name__", "")


def analyze_aliasing(graph: fx.Graph, inputs_may_alias: bool = True) -> AliasInfo:
    """Storage groups and accesses of a graph.

    Args:
        inputs_may_alias: put inputs and constants into one group, regardless of their fake tensors.

    Raises:
        AliasAnalysisError: a node is neither a call on tensors and sizes nor an input.
    """
    storages = _storages(graph)
    groups = _UnionFind()
    writers = {node: mutated_args(node) for node in graph.nodes if node.op != "output"}
    targets = {target for writes in writers.values() for target in writes}
    if inputs_may_alias:
        groups.join(number for node in graph.nodes if node.op == "placeholder" for number in storages[node])
    views: set[fx.Node] = set()
    for node, writes in writers.items():
        inputs = node.all_input_nodes
        if node.op == "placeholder" or not storages[node] or not inputs:
            continue
        if storages[node] <= _all(storages, inputs):
            if not writes and node not in targets:
                views.add(node)
        elif op_name(node)[1] in _MAYBE_VIEWS:
            groups.join(storages[node] | storages[inputs[0]])
    access = {}
    for node, writes in writers.items():
        changed = groups.roots(_all(storages, writes)) | ({_SIDE_EFFECTS} if _has_side_effects(node, writes) else set())
        access[node] = NodeAccess(groups.roots(_all(storages, node.all_input_nodes)), changed)
    holds = {node: groups.roots(numbers) for node, numbers in storages.items()}
    return AliasInfo(access, holds, frozenset(views))


class _UnionFind:
    """Groups of storages that may alias."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, item: int) -> int:
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def join(self, items: Iterable[int]) -> None:
        first: int | None = None
        for root in {self.root(item) for item in items}:
            first = root if first is None else first
            self._parent[root] = first

    def roots(self, items: Iterable[int]) -> frozenset[int]:
        return frozenset(map(self.root, items))


def _storages(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """The storages of each node's tensors, found by running the graph on fake tensors.

    The fake values of the graph do not suffice: a graph that was loaded from the cache has lost which of them are views.
    """
    values: dict[fx.Node, Any] = {}
    numbers: dict[int, int] = {}
    keep_alive: list[Any] = []  # the identity of a freed storage may be reused
    storages: dict[fx.Node, frozenset[int]] = {}
    mode = next((each.fake_mode for each in map(value, graph.nodes) if hasattr(each, "fake_mode")), None)
    if mode is None:
        raise AliasAnalysisError("the graph holds no tensor")
    with mode, enable_python_dispatcher(), torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                continue
            values[node] = _run(node, values)
            tensors = [leaf for leaf in _leaves(values[node]) if isinstance(leaf, Tensor)]
            keep_alive += tensors
            storages[node] = frozenset(
                numbers.setdefault(each.untyped_storage()._cdata, len(numbers)) for each in tensors
            )
    return storages


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        fake = value(node)
        return fake.detach() if isinstance(fake, Tensor) else fake
    if computes_sizes(node):
        return value(node)
    if node.op not in ("call_function", "call_method"):
        raise AliasAnalysisError(f"{node.name} is a {node.op}")
    if not any(
        isinstance(leaf, (Tensor, *SYMBOLIC)) for each in (node, *node.all_input_nodes) for leaf in _leaves(value(each))
    ):
        raise AliasAnalysisError(f"{node.name} sets a mode of torch")  # such as autocast, which must not be left on
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        result = run_target(node.target, args, kwargs)
    except Exception as error:  # an op may raise anything
        raise AliasAnalysisError(f"{node.name} cannot be run on fake tensors ({str(error).splitlines()[0]})") from error
    if not all(isinstance(leaf, (Tensor, torch.SymInt, int, float, bool, type(None))) for leaf in _leaves(result)):
        raise AliasAnalysisError(f"{node.name} is neither a tensor nor a size")
    return result


def _leaves(thing: Any) -> Iterator[Any]:
    if isinstance(thing, (tuple, list)):
        for item in thing:
            yield from _leaves(item)
    else:
        yield thing


def _all(storages: dict[fx.Node, frozenset[int]], nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(number for node in nodes for number in storages[node])


def _has_side_effects(node: fx.Node, writes: list[fx.Node]) -> bool:
    """Whether the node has an effect besides its value and writes: random numbers, an assertion, a collective."""
    if collective_group(node) is not None:
        return True
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or not (target._schema.returns or writes)
    return op_name(node)[1].rstrip("_") in _RANDOM or (not node.users and not writes)
