"""Who touches which memory in a graph: storages and their views, by running it on fake tensors; reads and writes by node.

A storage and all its views are one group. Inputs and constants are one group together where nothing tells whether two of them
are views of one tensor.
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
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.ir.symbols import value

# What these return may or may not be a view of what they take, by the sizes of the moment.
_MAYBE_VIEWS = frozenset(
    {
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "ravel",
        "contiguous",
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "int",
        "long",
        "bool",
        "expand",
        "expand_as",
        "dropout",
        "squeeze",
        "view_as_real",
        "resolve_conj",
        "resolve_neg",
        "real",
        "pad",
    }
)
# Random functions of Torch IR draw from one generator; ATen's say so by a tag.
_RANDOM = frozenset(
    {"dropout", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial", "normal"}
)
_SIDE_EFFECTS = -1  # the group that stands for everything that is no tensor: the generator, assertions, the other ranks


class AliasAnalysisError(Exception):
    """What a graph holds that no memory can be told of."""


@dataclass(frozen=True)
class NodeAccess:
    """The storage groups that a node reads, and those that it writes to in place.

    Making a tensor is no write: whoever touches the new storage has it from its maker.
    """

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True)
class AliasInfo:
    """Who touches which storage in a graph.

    Attributes:
        access: of every node but the output.
        views: tensors, or lists of them, that do nothing but look at their argument in another shape: any reader can repeat them.
        mutated_args: nodes that some node writes to.
        holds: the storage groups that a node's tensors live in.
    """

    access: dict[fx.Node, NodeAccess]
    holds: dict[fx.Node, frozenset[int]]
    views: frozenset[fx.Node]
    mutated_args: frozenset[fx.Node]


def computes_sizes(node: fx.Node) -> bool:
    """Whether a node is a size or a shape, or computes one."""
    leaves = list(_leaves(value(node)))
    return bool(leaves) and all(
        isinstance(each, (torch.SymInt, torch.SymBool, torch.SymFloat, int, float)) for each in leaves
    )


def op_name(node: fx.Node) -> tuple[str, str]:
    """Namespace and name of what a call calls, without overload: `("aten", "add")`; no namespace for a Python function."""
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
        inputs_may_alias: inputs and constants are one group, whatever their fake tensors say.

    Raises:
        AliasAnalysisError: a node is neither a call on tensors and sizes nor an input.
    """
    storages = _storages(graph)
    groups = _UnionFind()
    writers = {node: mutated_args(node) for node in graph.nodes if node.op != "output"}
    targets = frozenset(target for writes in writers.values() for target in writes)
    if inputs_may_alias:
        groups.join(number for node in graph.nodes if node.op == "placeholder" for number in storages[node])
    views: set[fx.Node] = set()
    for node, writes in writers.items():
        taken = node.all_input_nodes
        if node.op == "placeholder" or not storages[node] or not taken:
            continue
        if storages[node] <= _all(storages, taken):
            if not writes and node not in targets:
                views.add(node)
        elif op_name(node)[1] in _MAYBE_VIEWS:
            groups.join(storages[node] | storages[taken[0]])
    access = {}
    for node, writes in writers.items():
        changed = groups.roots(_all(storages, writes)) | ({_SIDE_EFFECTS} if _has_side_effects(node, writes) else set())
        access[node] = NodeAccess(groups.roots(_all(storages, node.all_input_nodes)), changed)
    holds = {node: groups.roots(numbers) for node, numbers in storages.items()}
    return AliasInfo(access, holds, frozenset(views), targets)


class _UnionFind:
    """Storages that may be one: a union-find over numbers."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, item: int) -> int:
        while (above := self._parent.get(item, item)) != item:
            item = above
        return item

    def join(self, items: Iterable[int]) -> None:
        first: int | None = None
        for root in {self.root(item) for item in items}:
            first = root if first is None else first
            self._parent[root] = first

    def roots(self, items: Iterable[int]) -> frozenset[int]:
        return frozenset(map(self.root, items))


def _storages(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """For every node, the storages of its tensors, by running the graph on fake tensors.

    The values that tracing left do not tell: a graph that was loaded from the cache has forgotten which were views.
    """
    values: dict[fx.Node, Any] = {}
    numbers: dict[int, int] = {}
    keep: list[Any] = []  # a storage that dies would lend its identity to the next
    found: dict[fx.Node, frozenset[int]] = {}
    mode = next((each.fake_mode for each in map(value, graph.nodes) if hasattr(each, "fake_mode")), None)
    if mode is None:
        raise AliasAnalysisError("it holds no tensor")
    with mode, enable_python_dispatcher(), torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                continue
            values[node] = _run(node, values)
            tensors = list(_tensors(values[node]))
            keep += tensors
            found[node] = frozenset(numbers.setdefault(each.untyped_storage()._cdata, len(numbers)) for each in tensors)
    return found


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        known = value(node)
        return known.detach() if isinstance(known, Tensor) else known
    if computes_sizes(node):
        return value(node)
    if node.op not in ("call_function", "call_method"):
        raise AliasAnalysisError(f"{node.name} is a {node.op}")
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # an op raises what it likes
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


def _tensors(thing: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in _leaves(thing) if isinstance(leaf, Tensor))


def _all(storages: dict[fx.Node, frozenset[int]], nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(number for node in nodes for number in storages[node])


def _has_side_effects(node: fx.Node, writes: list[fx.Node]) -> bool:
    """Whether the node does what is neither its value nor a write: draws random numbers, asserts, or meets other ranks."""
    if collective_group(node) is not None:
        return True
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or not (target._schema.returns or writes)
    return op_name(node)[1].rstrip("_") in _RANDOM or (not node.users and not writes)
