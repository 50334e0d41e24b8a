"""What a pass is: a named rewrite of a captured graph that says what it did and what it nearly did.

A pass of your own is a class with four facts and `run`:

    class DropDropout(GraphPass):
        name, numerics = "drop_dropout", "exact"

        def run(self, graph):
            matches = 0
            for node, (x, *_) in self.calls(graph, F.dropout, "input", p=0.5, training=False, inplace=False):
                node.replace_all_uses_with(x)
                matches += 1
            return PassResult(matches=matches, rewritten=matches)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import fx

from torchweave.compile.graph import CapturedGraph

Numerics = Literal["exact", "tolerance"]
Stage = Literal["torch_ir", "aten"]


@dataclass(frozen=True)
class NearMiss:
    """Something that looks like a match and was left alone.

    Attributes:
        node: where.
        why: one sentence.
    """

    node: str
    why: str


@dataclass(frozen=True)
class PassResult:
    """What a pass did: matches, nodes that it took out of the graph, and what it nearly matched."""

    matches: int = 0
    rewritten: int = 0
    near_misses: tuple[NearMiss, ...] = ()


@runtime_checkable
class Pass(Protocol):
    """A rewrite of a captured graph.

    Attributes:
        name: unique; a config switches a pass off by it.
        stage: `torch_ir`: on the graph as traced; `aten`: on a piece after lowering.
        numerics: `exact`: results stay what they were; `tolerance`: within the pass's own documented bound.
        token_range: smallest and largest token count at which it pays; None for an open end.
    """

    name: str
    stage: Stage
    numerics: Numerics
    token_range: tuple[int | None, int | None]

    def run(self, graph: CapturedGraph) -> PassResult: ...


class Mismatch(Exception):
    """A call has arguments that a pattern does not know."""


class GraphPass(ABC):
    """Base of passes: defaults for the facts, and call matching that never ignores an argument."""

    name: str = ""
    stage: Stage = "torch_ir"
    numerics: Numerics = "exact"
    token_range: tuple[int | None, int | None] = (None, None)

    @abstractmethod
    def run(self, graph: CapturedGraph) -> PassResult:
        """See `Pass.run`."""

    @staticmethod
    def bind(node: fx.Node, *required: str, **optional: Any) -> tuple[Any, ...]:
        """The arguments of a call by the given signature, defaults filled in.

        Raises:
            Mismatch: the call has an argument that the signature does not name (an `alpha=2` must not be matched away),
                or lacks one.
        """
        names = (*required, *optional)
        if len(node.args) > len(names):
            raise Mismatch(f"{len(node.args)} positional arguments, at most {len(names)} are known")
        if unknown := sorted(set(node.kwargs) - set(names)):
            raise Mismatch(f"unexpected argument {', '.join(unknown)}")
        found = {**optional, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        if missing := [name for name in required if name not in found]:
            raise Mismatch(f"no argument {', '.join(missing)}")
        return tuple(found[name] for name in names)

    def calls(
        self, graph: CapturedGraph, target: Callable[..., Any], *required: str, **optional: Any
    ) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
        """Every call of `target` whose arguments are all known, with them. The graph may be changed meanwhile."""
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and node.target is target:
                try:
                    yield node, self.bind(node, *required, **optional)
                except Mismatch:
                    continue
