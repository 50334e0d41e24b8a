"""What tracing and building assumed about the dynamic sizes, and for which sizes it holds.

With backed symbols, torch decides some questions by the example's sizes and leaves a guard behind. No guard is kept, so
each is tried here instead: one that fails for ordinary sizes means that the graph is wrong for them, and is refused; one
that fails only above some size gives a limit, which is checked at every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from torchweave.compiler.errors import VIEW_MUTATION_HINT, SizeError, user_location
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import fixed_sizes
from torchweave.config.options import DynamicShapes
from torchweave.report import Report

_MIN_VALID_SIZE = 64
"""Sizes up to this one are ordinary."""
MAX_SIZE = 1 << 24
_EXHAUSTIVE_LIMIT = 512
"""A guard on one size is tried at every one up to this."""


def size_range(graph: CapturedGraph, mode: DynamicShapes, report: Report) -> tuple[int, int]:
    """The smallest and largest value that every dynamic size may take.

    A guard of torch's own against size 1 does not count with `backed_size_oblivious`: it stands for the general path, which holds
    for 1 too. Where forward branches, and with `backed`, 1 is excluded.

    Raises:
        SizeError: the graph is right only for some ordinary sizes.
    """
    failing = {str(guard): sloc for guard, sloc in _guards(graph) if not _is_true_at_one(guard, graph.symbols)}
    for text in sorted(failing):
        report.event("assumption", expression=text, fails_at=1, mode=mode)
    return 2 if mode == "backed" or any(map(_is_branch, failing.values())) else 1, max_size(graph)


def num_guards(graph: CapturedGraph) -> int:
    """How many guards there are, for `max_size` to tell those of a build from what was there before."""
    return len(_guards(graph))


def max_size(graph: CapturedGraph, first: int = 0) -> int:
    """The largest value that every dynamic size may take, as far as guards from number `first` on say.

    Raises:
        SizeError: they hold only for some ordinary sizes, or a size has become a number.
    """
    for symbol, size in fixed_sizes(graph.fake_mode.shape_env).items():
        if symbol in graph.symbols:
            raise SizeError(
                f"{graph.symbols[symbol]} was fixed to {size} while pieces were built; {VIEW_MUTATION_HINT}"
            )
    limit = MAX_SIZE
    for guard, sloc in dict(_guards(graph)[first:]).items():
        valid_up_to = _valid_up_to(guard, graph.symbols, _is_branch(sloc))
        if valid_up_to < _MIN_VALID_SIZE:
            where, code = user_location(sloc)
            said = f"{guard} in `{code}`" if code else f"{guard}, from {sloc}"
            raise SizeError(f"forward takes another path for a size of {valid_up_to + 1} ({said})", where)
        limit = min(limit, valid_up_to)
    return limit


def _guards(graph: CapturedGraph) -> list[tuple[Any, Any]]:
    """What must hold of sizes, and where that was found."""
    shape_env = graph.fake_mode.shape_env
    return [(shape_env.replace(guard.expr), guard.sloc) for guard in shape_env.guards] if shape_env is not None else []


def _is_branch(sloc: Any) -> bool:
    """Whether a guard says which way forward's own code went, and not an operation of torch's."""
    return "/torch/_dynamo/" in str(getattr(sloc, "framework_loc", "")).replace("\\", "/")


def _valid_up_to(guard: Any, symbols: Mapping[str, str], equal: bool) -> int:
    """The size up to which a guard is true, whatever each of the dynamic sizes is.

    Args:
        equal: also where two names have the same size; where an operation asks for that, the general path holds for it too.
    """
    read = _names(guard, symbols)

    def holds(largest: int) -> bool:
        """Whether it is true wherever the largest size is this one."""
        if equal:
            others = itertools.product([size for size in sizes if size <= largest], repeat=len(read) - 1)
        else:
            others = itertools.permutations([size for size in sizes if size < largest], len(read) - 1)
        points = ((*rest[:at], largest, *rest[at:]) for rest in others for at in range(len(read)))
        return all(_is_true(guard, symbols, dict(zip(read, point, strict=True))) for point in points)

    sizes = _probe_sizes(guard, len(read))
    known = 1
    for size in sizes if read else ():
        if not holds(size):
            return _bisect(holds, known, size)
        known = size
    return MAX_SIZE if read or guard != False else 1  # noqa: E712  sympy's own false is no False


def _probe_sizes(guard: Any, num_names: int) -> list[int]:
    """The sizes at which a guard is tried: at every small one, and about its own numbers, or of several names, at fewer."""
    own = {abs(int(number)) for number in guard.atoms(sympy.Integer)}
    own |= {one * other for one, other in itertools.combinations(sorted(own), 2)}
    about = {number + step for number in {*own, 8, 16, 32, 64, 128} for step in (-1, 0, 1)}
    powers = {1 << power for power in range(MAX_SIZE.bit_length())}
    sizes = sorted(
        size for size in {*about, *powers, *range(_EXHAUSTIVE_LIMIT if num_names == 1 else 8)} if 2 <= size <= MAX_SIZE
    )
    return sizes if num_names < 3 else sizes[:: 3 ** (num_names - 2)]


def _is_true_at_one(guard: Any, symbols: Mapping[str, str]) -> bool:
    """Whether it is true for sizes of 1 and a little more, no two names having the same one."""
    names = _names(guard, symbols)
    small = range(1, 1 + len(names))
    return all(_is_true(guard, symbols, dict(zip(names, sizes, strict=True))) for sizes in (small, small[::-1]))


def _names(guard: Any, symbols: Mapping[str, str]) -> list[str]:
    """The sizes that a guard is about, as the caller calls them; one of which no operation knows goes by its symbol."""
    return sorted({symbols.get(str(symbol), str(symbol)) for symbol in guard.free_symbols})


def _is_true(guard: Any, symbols: Mapping[str, str], sizes: Mapping[str, int]) -> bool:
    """Whether a guard is true, or undecided, for these sizes by name."""
    values = {symbol: sizes[symbols.get(str(symbol), str(symbol))] for symbol in guard.free_symbols}
    return guard.xreplace(values) != False  # noqa: E712  sympy's own false is no False


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number for which `holds`, which is true at `low` and false at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
