"""Facts of tensors in patterns: `mm.shape[1] // 2`, `mm.dtype`, `x.size(0)`, which are compared by value and match no call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

_ATTRIBUTES = ("shape", "dtype", "device", "ndim")
_METHODS = {"size": "shape", "dim": "ndim"}
_OPERATORS = (
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pow,
)  # fmt: skip


def fact_nodes(nodes: Iterable[fx.Node], kinds: Mapping[fx.Node, Any]) -> frozenset[fx.Node]:
    """The nodes of a traced pattern that read facts of tensors, or compute with such facts and with whole numbers.

    Args:
        kinds: annotation of each placeholder.
    """
    facts: set[fx.Node] = set()
    for node in nodes:
        reads = node.target is getattr and node.args[1] in _ATTRIBUTES
        reads |= node.op == "call_method" and node.target in _METHODS
        inner = node.target in _OPERATORS and all(
            source in facts or kinds.get(source) is int for source in node.all_input_nodes
        )
        if reads or (inner and node.op == "call_function"):
            facts.add(node)
    return frozenset(facts)


def fact_value(expression: Any, of: Callable[[fx.Node], Any], facts: frozenset[fx.Node]) -> Any:
    """A fact, given the value of each node of the pattern that is none."""
    if not isinstance(expression, fx.Node):
        return expression
    if expression not in facts:
        return of(expression)
    first, *others = (fact_value(argument, of, facts) for argument in expression.args)
    if expression.op == "call_method":
        read = getattr(first, _METHODS[str(expression.target)])
        return read if callable(read) or not others else read[others[0]]
    return expression.target(first, *others)  # type: ignore[operator]


def describe_fact(expression: Any, facts: frozenset[fx.Node]) -> str:
    """A fact as it is written: `mm.shape[1] // 2`."""
    if not isinstance(expression, fx.Node) or expression not in facts:
        return str(expression)
    first, *others = (describe_fact(argument, facts) for argument in expression.args)
    if expression.target is getattr:
        return f"{first}.{others[0]}"
    if expression.target is operator.getitem:
        return f"{first}[{others[0]}]"
    if expression.op == "call_method":
        return f"{first}.{expression.target}({', '.join(others)})"
    symbols = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**"}
    name = expression.target.__name__  # type: ignore[union-attr]
    return f"{first} {symbols[name]} {others[0]}" if others else f"-{first}"


def same_fact(one: Any, other: Any) -> bool:
    """Whether two facts are equal for every size; compared as text, since a comparison of sizes would add a guard."""
    sizes = (int, torch.SymInt)
    if isinstance(one, sizes) and isinstance(other, sizes):
        return str(one) == str(other)
    return type(one) is type(other) and bool(one == other)
