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

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import fx

from torchweave.compiler.ir.graph import CapturedGraph

Numerics = Literal["exact", "tolerance"]
Stage = Literal["torch_ir", "aten"]
Build = Literal["inductor", "fx"]
Need = Literal["ranks", "userbuffers"]
TokenRange = tuple[int | None, int | None]


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
    """A rewrite of a graph. Its docstring (of a fusion: its file's) shows Before, After, When, Numerics and Pays.

    Attributes:
        name: unique; a config switches a pass on or off by it.
        stage: `torch_ir`: on the whole graph as traced (weights and their layout); `aten`: on each distinct piece after
            lowering (operations).
        numerics: `exact`: the same roundings at the same places, the order of a sum is free; `tolerance`: a rounding is left
            out or added, within the pass's own documented bound.
        token_range: smallest and largest token count at which it pays; None for an open end. A piece in which such a pass of
            the ATen stage matches is built twice, and the call chooses by its token count. An op that chooses its kernel
            when it runs leaves the range open.
        fixpoint: run again until nothing matches any more.
        gated: off unless a measurement, or the config, says that it pays.
        builds: for pieces that are built how it is meant.
    """

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def numerics(self) -> Numerics: ...
    @property
    def token_range(self) -> TokenRange: ...
    @property
    def fixpoint(self) -> bool: ...
    @property
    def gated(self) -> bool: ...
    @property
    def builds(self) -> tuple[Build, ...]: ...

    def run(self, graph: Any) -> PassResult:
        """Rewrite a graph in place: a `CapturedGraph` in the Torch IR stage, a lowered `Piece` in the ATen stage."""
        ...


def document(each: Pass) -> str:
    """What a pass says of itself: of a fusion, the docstring of its file; of a class, that of its file or its own."""
    written = getattr(each, "document", None)
    if isinstance(written, str):
        return written
    module = inspect.getdoc(sys.modules[type(each).__module__]) or ""
    return module if "Before" in module else inspect.getdoc(type(each)) or ""


def declaration_error(each: Pass) -> str | None:
    """What a pass declares that means nothing, or None: of an unknown stage it would never run, and nobody would say so."""
    for fact, known in (("stage", Stage), ("numerics", Numerics)):
        if getattr(each, fact) not in get_args(known):
            return f"{fact} is {getattr(each, fact)!r}, not one of {', '.join(get_args(known))}"
    if unknown := set(each.builds) - set(get_args(Build)):
        return f"builds has {sorted(unknown)[0]!r}, not only {', '.join(get_args(Build))}"
    low, high = each.token_range
    return f"token_range {low}..{high} holds no token count" if high is not None and high < max(low or 1, 1) else None


class Mismatch(Exception):
    """A call has arguments that a pattern does not know."""


class GraphPass(ABC):
    """Base of passes: defaults for the facts, and call matching that never ignores an argument.

    Attributes:
        needs: what there must be for the pass to find anything: several `ranks`, `userbuffers` that they share.
        shape: of a gated pass, the shape of a table's answers that say whether it pays; None: any.
    """

    name: str = ""
    stage: Stage = "torch_ir"
    numerics: Numerics = "exact"
    token_range: TokenRange = (None, None)
    fixpoint: bool = False
    gated: bool = False
    builds: tuple[Build, ...] = ("inductor", "fx")
    needs: tuple[Need, ...] = ()
    shape: str | None = None

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
