"""In-place writes: the arguments that each node of a Torch IR graph mutates."""

from __future__ import annotations

import functools
import inspect
import operator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.symbols import value

_IN_PLACE_OPERATORS = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift,
)  # fmt: skip
_IN_PLACE_METHODS = frozenset(f"__{each.__name__}__" for each in _IN_PLACE_OPERATORS)
# Functions of torch that write to the arguments when the option is given and true.
_CONDITIONAL_MUTATIONS = {
    "batch_norm": (("running_mean", "running_var"), "training"),
    "instance_norm": (("running_mean", "running_var"), "use_input_stats"),
    "embedding": (("weight",), "max_norm"),
    "embedding_bag": (("weight",), "max_norm"),
}


def op_overload(target: Any) -> torch._ops.OpOverload | None:
    """The op overload that a call's target is, a packet's first; None for any other target."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target if isinstance(target, torch._ops.OpOverload) else None


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node writes to, by torch's naming rules or the schema of an op."""
    if node.op == "call_method":
        return _nodes(node.args[:1]) if _is_in_place_name(str(node.target)) else []
    if node.op != "call_function":
        return []
    target: Any = node.target
    if (op := op_overload(target)) is not None:
        return _by_schema(op, node)
    if target in _IN_PLACE_OPERATORS or _is_in_place_name(getattr(target, "__name__", "")):
        return _nodes(node.args[:1])
    if node.kwargs.get("out") is not None:
        return _nodes([node.kwargs["out"]])
    return _by_signature(target, node) if isinstance(target, FunctionType) else []


def has_mutations(graph: fx.Graph) -> bool:
    """Whether an operation of the graph may write to one of its arguments; a nested graph counts as a write."""
    return any(node.op == "get_attr" or mutated_args(node) for node in graph.nodes)


def storage_id(node: fx.Node) -> int | None:
    """Identity of the storage of a node's fake tensor, equal for a tensor and its views; None when it is not a tensor."""
    fake = value(node)
    return fake.untyped_storage()._cdata if isinstance(fake, Tensor) else None


def mutated_aliased_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """Storages that the graph writes to and several inputs share, each with the first of these inputs."""
    targets = {storage_id(argument) for node in graph.nodes for argument in mutated_args(node)} - {None}
    first: dict[int, fx.Node] = {}
    shared: dict[int, fx.Node] = {}
    for node in graph.nodes if targets else ():
        storage = storage_id(node) if node.op == "placeholder" else None
        if storage is not None and storage in targets and first.setdefault(storage, node) is not node:
            shared[storage] = first[storage]
    return shared


def _is_in_place_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS


def _by_signature(function: FunctionType, node: fx.Node) -> list[fx.Node]:
    """Writes of a Python function, from its arguments by name or position, as in `elu(x, 1.0, True)`."""
    names = _parameters(function)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("inplace"):
        return _nodes([given[names[0]]])
    targets, condition = _CONDITIONAL_MUTATIONS.get(function.__name__, ((), ""))
    return _nodes([given.get(name) for name in targets]) if given.get(condition) else []


@functools.cache
def _parameters(function: FunctionType) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _by_schema(op: torch._ops.OpOverload, node: fx.Node) -> list[fx.Node]:
    mutated = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated.append(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
    return _nodes(mutated)


def _nodes(items: Any) -> list[fx.Node]:
    flat: list[fx.Node] = []
    for item in items:
        if isinstance(item, fx.Node):
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            flat += _nodes(item)
    return flat
