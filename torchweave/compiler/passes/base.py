"""Pass interface: a named rewrite of a graph that reports its matches and near-misses.

A user pass is a class with a name, facts and `run`:

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import fx

from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.plug_points import PASSES

Numerics = Literal["exact", "tolerance"]
Stage = Literal["torch_ir", "aten", "inductor"]
Build = Literal["inductor", "fx"]
Need = Literal["ranks", "userbuffers"]
TokenRange = tuple[int | None, int | None]


@dataclass(frozen=True)
class NearMiss:
    """A node that resembles a match but was left unchanged, and the reason, one sentence."""

    node: str
    why: str


@dataclass(frozen=True)
class PassResult:
    """Result of a pass: number of matches, number of nodes removed from the graph, and near-misses."""

    matches: int = 0
    rewritten: int = 0
    near_misses: tuple[NearMiss, ...] = ()


@runtime_checkable
class Pass(Protocol):
    """A rewrite of a graph. Its docstring (a fusion: its file's) has the sections Before, After, When, Numerics and Pays.

    Attributes:
        name: unique; the config enables and disables a pass by it.
        stage: `torch_ir`: the whole captured graph (weights and their layout); `aten`: each distinct lowered piece (operations);
            `inductor`: Inductor's graph of a piece, after its own passes.
        numerics: `exact`: same roundings at the same places, free summation order; `tolerance`: drops or adds a rounding within
            the bound that the pass documents.
        token_range: smallest and largest token count at which it pays; None for an open end. A piece in which such an ATen pass
            matches is built twice, and each call selects the build by its token count. Passes whose op selects its kernel at
            run time leave the range open.
        fixpoint: repeat until nothing matches.
        gated: disabled unless a measurement or the config enables it.
        builds: builds of a piece (Inductor or FX code) in which the pass runs.
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
        """Rewrite a graph in place: a `CapturedGraph` in the Torch IR stage, a lowered `Piece` in the ATen stage, an `fx.Graph` in
        Inductor's."""
        ...


def near_misses_by_reason(names_by_reason: Mapping[str, Sequence[str]]) -> tuple[NearMiss, ...]:
    """One near-miss for each reason, with the names of all its nodes."""
    return tuple(NearMiss(", ".join(names), why) for why, names in names_by_reason.items() if names)


def document(each: Pass) -> str:
    """Documentation of a pass: its `document`, else the docstring of its file if that has a Before section, else its class's."""
    written = getattr(each, "document", None)
    if isinstance(written, str):
        return written
    module = inspect.getdoc(sys.modules[type(each).__module__]) or ""
    return module if "Before" in module else inspect.getdoc(type(each)) or ""


def declaration_error(each: Pass) -> str | None:
    """The invalid fact of a pass, or None. A pass with an unknown stage would never run, without any message."""
    for fact, known in (("stage", Stage), ("numerics", Numerics)):
        if getattr(each, fact) not in get_args(known):
            return f"{fact} is {getattr(each, fact)!r}, not one of {', '.join(get_args(known))}"
    if unknown := set(each.builds) - set(get_args(Build)):
        return f"builds has {sorted(unknown)[0]!r}, not only {', '.join(get_args(Build))}"
    low, high = each.token_range
    return f"token_range {low}..{high} holds no token count" if high is not None and high < max(low or 1, 1) else None


def load_pass(name: str) -> Pass:
    """Load the pass `module:Name`, or of an entry point: an instance, or a class, which is called without arguments.

    Raises:
        ValueError: the module or name does not exist, or the object is not a pass.
    """
    loaded = as_pass(PASSES.get(name), name)
    try:
        instance = loaded() if isinstance(loaded, type) else loaded
    except TypeError as error:
        raise ValueError(
            f"passes: {name} cannot be constructed without arguments ({error}); name an instance"
        ) from error
    if not isinstance(instance, Pass):
        facts = ("name", "stage", "numerics", "token_range", "fixpoint", "gated", "builds", "run")
        missing = ", ".join(fact for fact in facts if not hasattr(instance, fact))
        raise ValueError(
            f"passes: {name} is not a pass, it lacks {missing}; derive it from torchweave.compiler.GraphPass"
        )
    return instance


class Mismatch(Exception):
    """The arguments of a call do not fit the expected signature."""


class GraphPass(ABC):
    """Base class of passes: defaults for the facts, and call matching that accounts for every argument.

    Attributes:
        needs: requirements: several `ranks`, or `userbuffers` shared by them.
        shape: for a gated pass, the table shape whose entries decide whether it pays; None: any.
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
        """Arguments of a call in the order of the given signature, with defaults filled in.

        Raises:
            Mismatch: the call has an argument outside the signature (dropping an `alpha=2` would change results), or lacks
                a required one.
        """
        names = (*required, *optional)
        if len(node.args) > len(names):
            raise Mismatch(f"{len(node.args)} positional arguments, expected at most {len(names)}")
        if unknown := sorted(set(node.kwargs) - set(names)):
            raise Mismatch(f"unexpected argument {', '.join(unknown)}")
        arguments = {**optional, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        if missing := [name for name in required if name not in arguments]:
            raise Mismatch(f"missing argument {', '.join(missing)}")
        return tuple(arguments[name] for name in names)

    def calls(
        self, graph: CapturedGraph, target: Callable[..., Any], *required: str, **optional: Any
    ) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
        """Yield each call of `target` that fits the signature, with its arguments. The graph may change during iteration."""
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and node.target is target:
                try:
                    yield node, self.bind(node, *required, **optional)
                except Mismatch:
                    continue


class DevicePass(GraphPass):
    """A pass for some kinds of devices.

    Args:
        devices: device types on which it runs; on others the op that it inserts is its reference, which only tests use.
    """

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)


class TorchPatternPass(GraphPass):
    """A pattern matcher of torch, see `inductor_graph`; it counts as exact, since nothing tells of its numbers."""

    stage = "inductor"
    builds = ("inductor",)

    def __init__(self, patterns: Any, name: str = "") -> None:
        self.patterns = patterns
        self.name = getattr(patterns, "pass_name", None) or name or "torch_patterns"

    def run(self, graph: Any) -> PassResult:
        """Replace the matches in Inductor's graph."""
        matches = self.patterns.apply(graph)
        return PassResult(matches, matches)


def as_pass(value: Any, name: str = "") -> Any:
    """A pattern matcher of torch as a pass; anything else as it is.

    Args:
        name: of the pass, where the matcher has none.
    """
    module = sys.modules.get("torch._inductor.pattern_matcher")  # not imported: the object is none of it
    is_matcher = module is not None and isinstance(value, module.PatternMatcherPass)
    return TorchPatternPass(value, name) if is_matcher else value
