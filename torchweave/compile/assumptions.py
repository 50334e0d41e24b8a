"""What tracing and building assumed about the dynamic sizes, and for which sizes it holds.

With backed symbols, torch decides some questions by the example's sizes and leaves a guard behind. No guard is kept, so
each is tried here instead: one that fails for ordinary sizes means that the graph is wrong for them, and is refused; one
that fails only above some size gives a limit, which is checked at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchweave.compile.errors import WRITES_TO_VIEWS, SizeError, users_line
from torchweave.compile.graph import CapturedGraph
from torchweave.compile.symbols import fixed_sizes
from torchweave.config import DynamicShapes
from torchweave.log import Report

_ORDINARY = (2, 7, 64)
HIGHEST = 1 << 24


def size_range(graph: CapturedGraph, mode: DynamicShapes, report: Report) -> tuple[int, int]:
    """The smallest and largest value that every dynamic size may take.

    A guard against size 1 does not count with `backed_size_oblivious`: it stands for the general path, which holds for 1
    too. With `backed`, 1 is excluded.

    Raises:
        SizeError: the graph is right only for some ordinary sizes.
    """
    for text in sorted({str(guard) for guard, _ in _guards(graph) if not _holds(guard, 1, graph.symbols)}):
        report.event("assumption", expression=text, fails_at=1, mode=mode)
    return 2 if mode == "backed" else 1, highest(graph)


def num_guards(graph: CapturedGraph) -> int:
    """How many guards there are, for `highest` to tell those of a build from what was there before."""
    return len(_guards(graph))


def highest(graph: CapturedGraph, first: int = 0) -> int:
    """The largest value that every dynamic size may take, as far as guards from number `first` on say.

    Raises:
        SizeError: they hold only for some ordinary sizes, or a size has become a number.
    """
    for symbol, size in fixed_sizes(graph.fake_mode.shape_env).items():
        if symbol in graph.symbols:
            raise SizeError(f"{graph.symbols[symbol]} was fixed to {size} while pieces were built; {WRITES_TO_VIEWS}")
    guards = _guards(graph)[first:]
    for guard, sloc in guards:
        if wrong := [size for size in _ORDINARY if not _holds(guard, size, graph.symbols)]:
            where, code = users_line(sloc)
            said = f"{guard} in `{code}`" if code else f"{guard}, from {sloc}"
            raise SizeError(f"forward takes another path for a size of {wrong[0]} ({said})", where)

    def all_hold(size: int) -> bool:
        return all(_holds(guard, size, graph.symbols) for guard, _ in guards)

    return HIGHEST if all_hold(HIGHEST) else _last(all_hold, max(_ORDINARY), HIGHEST)


def _guards(graph: CapturedGraph) -> list[tuple[Any, Any]]:
    """What must hold of sizes, and where that was found."""
    shape_env = graph.fake_mode.shape_env
    return [(shape_env.replace(guard.expr), guard.sloc) for guard in shape_env.guards] if shape_env is not None else []


def _holds(expression: Any, size: int, symbols: Mapping[str, str]) -> bool:
    """Whether a guard is true when the dynamic sizes are about `size`, no two names having the same one."""
    names = sorted(set(symbols.values()))
    for order in (names, names[::-1]):
        sizes = {name: size + step for step, name in enumerate(order)}
        values = {}
        for symbol in expression.free_symbols:
            values[symbol] = sizes.get(symbols.get(str(symbol), ""), size)
        if expression.xreplace(values) == False:  # noqa: E712  sympy's own false is no False
            return False
    return True


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number for which `holds`, which is true at `low` and false at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
