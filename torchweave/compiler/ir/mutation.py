"""Which nodes of a Torch IR graph write to which of their arguments."""

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
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
)
_IN_PLACE_METHODS = frozenset(f"__{each.__name__}__" for each in _IN_PLACE_OPERATORS)
# What functions of torch write to besides what their names say: these arguments, where that one is given and true.
_CONDITIONAL_MUTATIONS = {
    "batch_norm": (("running_mean", "running_var"), "training"),
    "instance_norm": (("running_mean", "running_var"), "use_input_stats"),
    "embedding": (("weight",), "max_norm"),
    "embedding_bag": (("weight",), "max_norm"),
}


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node writes to, by torch's naming rules and by the schema of a custom op."""
    if node.op == "call_method":
        return _nodes(node.args[:1]) if _is_in_place_name(str(node.target)) else []
    if node.op != "call_function":
        return []
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        return _by_schema(target, node)
    if target in _IN_PLACE_OPERATORS or _is_in_place_name(getattr(target, "__name__", "")):
        return _nodes(node.args[:1])
    if node.kwargs.get("out") is not None:
        return _nodes([node.kwargs["out"]])
    return _by_signature(target, node) if isinstance(target, FunctionType) else []


def has_mutations(graph: fx.Graph) -> bool:
    """Whether any operation of the graph may write to one of its arguments; a nested graph counts as one that does."""
    return any(node.op == "get_attr" or mutated_args(node) for node in graph.nodes)


def storage_id(node: fx.Node) -> int | None:
    """Identity of the storage that a node's fake tensor lives in: equal for a tensor and its views."""
    fake = value(node)
    return fake.untyped_storage()._cdata if isinstance(fake, Tensor) else None


def mutated_aliased_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """Storages that the graph writes to and that several of its inputs live in, each with the first of these."""
    targets = {storage_id(argument) for node in graph.nodes for argument in mutated_args(node)} - {None}
    first: dict[int, fx.Node] = {}
    found: dict[int, fx.Node] = {}
    for node in graph.nodes if targets else ():
        home = storage_id(node) if node.op == "placeholder" else None
        if home is not None and home in targets and first.setdefault(home, node) is not node:
            found[home] = first[home]
    return found


def _is_in_place_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS


def _by_signature(function: FunctionType, node: fx.Node) -> list[fx.Node]:
    """A function in Python may be told by any argument, named or not, as modules of torch do: `elu(x, 1.0, True)`."""
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
    found = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        found += _nodes([given])
    return found


def _nodes(items: Any) -> list[fx.Node]:
    flat: list[fx.Node] = []
    for item in items:
        if isinstance(item, fx.Node):
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            flat += _nodes(item)
    return flat
