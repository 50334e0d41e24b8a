"""Fusion: a pattern of operations, its replacement, and the condition.

Each fusion is one file, whose docstring is the pass's documentation (Before, After, When, Numerics, Pays):

    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        h = aten.add.Tensor(x, residual)
        return torchweave.rms_norm.default(h, weight, eps), h

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        return torchweave.add_rms_norm.default(x, residual, weight, eps)

    FUSION = Fusion("add_rms_norm", pattern, replacement)
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import (
    Build,
    NearMiss,
    Need,
    Numerics,
    PassResult,
    Stage,
    TokenRange,
    near_misses_by_reason,
)  # fmt: skip
from torchweave.compiler.passes.matcher import Match, PartialMatch, Pattern
from torchweave.compiler.passes.rewrite import describe_tensor, erase, insert, move_readers_after, same_tensor_metadata

Function = Callable[..., Any]


def _no_extra_check(match: Match) -> str | None:
    return None


@dataclass(frozen=True)
class Fusion:
    """A pass that rewrites every occurrence of a pattern in a lowered piece.

    Attributes:
        name: see `Pass`.
        pattern: one function, or several variants (dtypes, used outputs); the first match at a call wins. `passes.matcher`
            describes the form of a pattern.
        replacement: function of the pattern's parameters, by name, that computes its outputs; one for all variants, or one
            for each. The default of a parameter is passed where the match does not bind it.
        extra_check: returns the reason, one sentence, why a match is left unchanged, or None. Its former name is `where`.
        numerics, token_range, gated, fixpoint, builds: see `Pass`.
        needs: see `GraphPass`.
    """

    name: str
    pattern: Function | Sequence[Function]
    replacement: Function | Sequence[Function]
    extra_check: Callable[[Match], str | None] = _no_extra_check
    numerics: Numerics = "exact"
    token_range: TokenRange = (None, None)
    gated: bool = False
    fixpoint: bool = False
    builds: tuple[Build, ...] = ("inductor", "fx")
    stage: Stage = "aten"
    needs: tuple[Need, ...] = ()

    def __post_init__(self) -> None:
        patterns, replacements = _as_list(self.pattern), _as_list(self.replacement)
        if len(replacements) not in (1, len(patterns)):
            raise ValueError(f"{self.name}: {len(patterns)} patterns need 1 or {len(patterns)} replacements")
        for pattern, replacement in self._variant_pairs():
            parameters = inspect.signature(replacement).parameters
            required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
            if unknown := required - set(inspect.signature(pattern).parameters):
                raise ValueError(f"{self.name}: its pattern has no parameter {', '.join(sorted(unknown))}")

    def _variant_pairs(self) -> list[tuple[Function, Function]]:
        patterns, replacements = _as_list(self.pattern), _as_list(self.replacement)
        return list(zip(patterns, replacements * (len(patterns) if len(replacements) == 1 else 1), strict=True))

    @cached_property
    def variants(self) -> tuple[tuple[Pattern, Function], ...]:
        """Traced patterns with their replacements."""
        return tuple((Pattern(pattern), replacement) for pattern, replacement in self._variant_pairs())

    @property
    def where(self) -> Callable[[Match], str | None]:
        """Deprecated name of `extra_check`."""
        warnings.warn("Fusion.where is deprecated; read Fusion.extra_check", DeprecationWarning, stacklevel=2)
        return self.extra_check

    @property
    def document(self) -> str:
        """The docstring of the pattern's file, or of the replacement's where the pattern comes from a shared module."""
        files = [inspect.getdoc(sys.modules[function.__module__]) or "" for function in self._variant_pairs()[0]]
        return next((text for text in files if "Before" in text), files[0])

    @property
    def sources(self) -> tuple[str, ...]:
        """Importable names of the modules that define the fusion."""
        functions = [function for pair in self._variant_pairs() for function in pair]
        return tuple(sorted({function.__module__ for function in (*functions, self.extra_check)}))

    def run(self, graph: FakeGraph) -> PassResult:
        """See `Pass.run`."""
        matches = rewritten = 0
        near_nodes_by_reason: dict[str, list[fx.Node]] = {}
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node._erased:
                continue
            partial_matches: list[PartialMatch] = []
            for pattern, replacement in self.variants:
                num_erased, why = self._rewrite_at(graph, node, pattern, replacement)
                if num_erased:
                    matches, rewritten = matches + 1, rewritten + num_erased
                    break
                partial_matches += [why] if why else []
            else:
                if partial_matches:
                    near_nodes_by_reason.setdefault(
                        max(partial_matches, key=lambda each: each.matched_share).why, []
                    ).append(node)
        return PassResult(matches, rewritten, _surviving_near_misses(near_nodes_by_reason))

    def _rewrite_at(
        self, graph: FakeGraph, node: fx.Node, pattern: Pattern, replacement: Function
    ) -> tuple[int, PartialMatch | None]:
        """Rewrite the match that ends in `node`; return the number of erased nodes or, when 0, the near-miss if any."""
        match = pattern.match_at(node)
        if not isinstance(match, Match):
            return 0, match
        why = self.extra_check(match)
        if why is not None:
            return 0, PartialMatch(why)
        parameters = inspect.signature(replacement).parameters
        bound = [match.bindings.get(name, parameter.default) for name, parameter in parameters.items()]
        why = move_readers_after(match.nodes, match.outputs, [each for each in bound if isinstance(each, fx.Node)])
        if why is not None:
            return 0, PartialMatch(why)
        returned = insert(graph, match.nodes[-1], replacement, bound)
        new = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        why = _kind_mismatch(match.outputs, new)
        if why is not None:
            graph.graph.eliminate_dead_code()
            return 0, PartialMatch(why)
        for old, fresh in zip(match.outputs, new, strict=True):
            old.replace_all_uses_with(fresh)
        return erase(graph, match.nodes), None


def _accept_where(initialize: Callable[..., None]) -> Callable[..., None]:
    """Accept `where=`, the former name of `extra_check`, for one release."""

    @functools.wraps(initialize)
    def initialize_with_where(self: Fusion, *args: Any, **kwargs: Any) -> None:
        if "where" in kwargs:
            if "extra_check" in kwargs:
                raise ValueError("Fusion got both extra_check and where, its deprecated name; pass extra_check alone")
            warnings.warn("Fusion(where=...) is deprecated; pass extra_check", DeprecationWarning, stacklevel=2)
            kwargs["extra_check"] = kwargs.pop("where")
        initialize(self, *args, **kwargs)

    return initialize_with_where


Fusion.__init__ = _accept_where(Fusion.__init__)


def _surviving_near_misses(near_nodes_by_reason: dict[str, list[fx.Node]]) -> tuple[NearMiss, ...]:
    """Near-misses whose nodes no later match erased: the inside of a pattern may resemble a smaller pattern."""
    surviving = {why: [node.name for node in nodes if not node._erased] for why, nodes in near_nodes_by_reason.items()}
    return near_misses_by_reason(surviving)


def _kind_mismatch(outputs: Sequence[fx.Node], new: Sequence[Any]) -> str | None:
    """Why the results of a replacement do not fit the outputs, or None."""
    if len(outputs) != len(new):
        raise ValueError(f"the replacement returns {len(new)} values, the pattern {len(outputs)}")
    for old, fresh in zip(outputs, new, strict=True):
        if not isinstance(fresh, fx.Node) or not same_tensor_metadata(value(fresh), value(old)):
            actual = describe_tensor(value(fresh)) if isinstance(fresh, fx.Node) else repr(fresh)
            return f"the replacement of {old.name} would be {actual}, not {describe_tensor(value(old))}"
    return None


def _as_list(thing: Any) -> list[Any]:
    return list(thing) if isinstance(thing, (tuple, list)) else [thing]
