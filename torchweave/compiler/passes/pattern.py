"""A fusion: a pattern of operations, what stands in its place, and when.

A file of its own each; the file's docstring is the pass's documentation (Before, After, When, Numerics, Pays):

    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        h = aten.add.Tensor(x, residual)
        return torchweave.rms_norm.default(h, weight, eps), h

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        return torchweave.add_rms_norm.default(x, residual, weight, eps)

    FUSION = Fusion("add_rms_norm", pattern, replacement)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import Build, NearMiss, Need, Numerics, PassResult, Stage, TokenRange
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
        pattern: one function, or several variants (dtypes, outputs that are kept); the first that matches at a call wins.
            See `passes.matcher` for how a pattern is written.
        replacement: the function that computes the pattern's outputs, its parameters named like the pattern's; one for
            all variants, or one for each.
        extra_check: looks at a match and returns a sentence why it is left alone, or None.
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
            raise ValueError(f"{self.name}: {len(patterns)} patterns need one replacement or {len(patterns)}")
        for pattern, replacement in self._variant_pairs():
            if unknown := set(inspect.signature(replacement).parameters) - set(inspect.signature(pattern).parameters):
                raise ValueError(f"{self.name}: no parameter of its pattern is called {', '.join(sorted(unknown))}")

    def _variant_pairs(self) -> list[tuple[Function, Function]]:
        patterns, replacements = _as_list(self.pattern), _as_list(self.replacement)
        return list(zip(patterns, replacements * (len(patterns) if len(replacements) == 1 else 1), strict=True))

    @cached_property
    def variants(self) -> tuple[tuple[Pattern, Function], ...]:
        """The traced patterns, each with its replacement."""
        return tuple((Pattern(pattern), replacement) for pattern, replacement in self._variant_pairs())

    @property
    def document(self) -> str:
        """The docstring of the file that the pattern stands in."""
        return inspect.getdoc(sys.modules[_as_list(self.pattern)[0].__module__]) or ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Importable names of the modules that the rewrite comes from."""
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
        """Rewrite the match that ends in `node`: how many nodes that took away; when none, why it was only nearly one."""
        match = pattern.match_at(node)
        if not isinstance(match, Match):
            return 0, match
        why = self.extra_check(match)
        if why is not None:
            return 0, PartialMatch(why)
        bound = [match[name] for name in inspect.signature(replacement).parameters]
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


def _surviving_near_misses(near_nodes_by_reason: dict[str, list[fx.Node]]) -> tuple[NearMiss, ...]:
    """Near-misses but for those that a match took away later: the inside of a pattern may look like a smaller one."""
    still = {why: [node.name for node in nodes if not node._erased] for why, nodes in near_nodes_by_reason.items()}
    return tuple(NearMiss(", ".join(names), why) for why, names in still.items() if names)


def _kind_mismatch(outputs: Sequence[fx.Node], new: Sequence[Any]) -> str | None:
    """Why a replacement cannot stand for the outputs, or None."""
    if len(outputs) != len(new):
        raise ValueError(f"the replacement returns {len(new)} values, the pattern {len(outputs)}")
    for old, fresh in zip(outputs, new, strict=True):
        if not isinstance(fresh, fx.Node) or not same_tensor_metadata(value(fresh), value(old)):
            found = describe_tensor(value(fresh)) if isinstance(fresh, fx.Node) else repr(fresh)
            return f"the replacement of {old.name} would be {found}, not {describe_tensor(value(old))}"
    return None


def _as_list(thing: Any) -> list[Any]:
    return list(thing) if isinstance(thing, (tuple, list)) else [thing]
