"""Which calls of a graph are collectives, and what each of them exchanges with the other ranks of its group."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def schema_of(node: fx.Node) -> Any:
    """The schema of the op that a node calls; None where it calls no op."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def group_of(node: fx.Node) -> str | None:
    """The name of the group of ranks that a call exchanges data with; None for what is no collective.

    An op that takes a `str group` is one: the schema says it, and no list has to be kept.
    """
    schema = schema_of(node)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "group" and isinstance(argument.type, torch.StringType):
            given = node.args[index] if index < len(node.args) else node.kwargs.get("group")
            return None if given is None else str(given)
    return None
