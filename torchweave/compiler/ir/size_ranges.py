"""The range of dynamic sizes for which a graph is valid, from torch's guards.

With backed symbols, torch decides some branches by the example's sizes and records a guard. No guard is kept at run time;
each is evaluated here instead. A guard that fails for small sizes makes the graph invalid, which is an error; a guard that
fails only above a size gives an upper limit, which is checked at every call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from torchweave.compiler.errors import VIEW_MUTATION_HINT, SizeError, source_location, user_location
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.symbols import condition_text, fixed_sizes, value
from torchweave.config.options import DynamicShapes
from torchweave.report import Report

_MIN_VALID_SIZE = 64
"""The graph must be valid for all sizes up to this."""
MAX_SIZE = 1 << 24
_COPIES_BY_SIZE = frozenset({"contiguous", "reshape", "flatten", "ravel", "reshape_as"})
_EXHAUSTIVE_LIMIT = 512
"""A guard on one size is evaluated at every size up to this."""


class SizeRange(NamedTuple):
    """The smallest and largest valid value of every dynamic size, and why a size of 1 is excluded; "" when it is not."""

    low: int
    high: int
    why_not_one: str = ""


def size_range(graph: CapturedGraph, mode: DynamicShapes, report: Report, as_eager: bool = False) -> SizeRange:
    """The valid values of every dynamic size.

    With `backed_size_oblivious`, torch's own guards against size 1 are ignored: they select the general path, which is
    valid for 1 too. When forward itself branches, and with `backed`, 1 is excluded.

    Args:
        as_eager: exclude 1 as well where eager code would drop a dynamic dimension of size 1 (`squeeze`).

    Raises:
        SizeError: the graph is invalid for a size up to 64.
    """
    names = graph.size_names
    failing = {
        condition_text(guard, names): sloc
        for guard, sloc in _guards(graph)
        if not _is_true_at_one(guard, graph.symbols)
    }
    for text in sorted(failing):
        report.event("assumption", expression=text, fails_at=1, mode=mode)
    why = 'TorchCompileConfig(dynamic_shapes="backed") excludes a size of 1' if mode == "backed" else ""
    writes_views = _writes_to_views(graph)
    for sloc in failing.values():
        is_of_operation = _is_made_by(sloc, "run_node", "")  # Dynamo runs operations on fake tensors there
        if _is_branch(sloc) and (writes_views or not is_of_operation):
            where, code = user_location(sloc)
            why = f"for a size of 1 forward takes another path{_at(where)} (`{code}`)"
        if _is_made_by(sloc, "split", "/torch/_decomp/decompositions.py"):
            where, code = user_location(sloc)
            why = f"for a size of 1 forward splits a tensor into another number of parts{_at(where)} (`{code}`)"
    dropped = next(filter(_drops_dynamic_dim, graph.graph.nodes), None) if as_eager else None
    if dropped is not None:
        why = f"for a size of 1 forward drops a dimension by `squeeze`{_at(source_location(dropped))}"
    return SizeRange(2 if why else 1, max_size(graph), why)


def _at(where: str) -> str:
    """A place in a sentence; nothing for a graph of the compile cache, whose operations have no lines."""
    return f" at {where}" if where else ""


def _is_made_by(sloc: Any, function: str, file: str) -> bool:
    """Whether this function made the guard; `file`: the end of its file's name."""
    place = getattr(sloc, "framework_loc", None)
    path = str(getattr(place, "filename", "")).replace("\\", "/")
    return getattr(place, "name", "") == function and path.endswith(file)


def _writes_to_views(graph: CapturedGraph) -> bool:
    """Whether forward writes to a result that is a view or a copy depending on sizes, such as that of `contiguous()`, or
    afterwards to the tensor that it is made from."""
    storages: set[int | None] = set()
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target in _COPIES_BY_SIZE:
            storages |= {storage_id(node), storage_id(node.args[0])}
        if any(storage_id(argument) in storages for argument in mutated_args(node)):
            return True
    return False


def _drops_dynamic_dim(node: fx.Node) -> bool:
    if (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) != "squeeze":
        return False
    shape = value(node.all_input_nodes[0]).shape
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims: Any = range(len(shape)) if given is None else given if isinstance(given, (tuple, list)) else (given,)
    return any(isinstance(shape[dim], torch.SymInt) for dim in dims)


def num_guards(graph: CapturedGraph) -> int:
    """Number of guards: pass it to `max_size` as `first` to select the guards of a later build."""
    return len(_guards(graph))


def max_size(graph: CapturedGraph, first: int = 0) -> int:
    """The largest valid value of every dynamic size, by the guards from number `first` on.

    Raises:
        SizeError: the graph is invalid for a size up to 64, or a size has become a number.
    """
    for symbol, size in fixed_sizes(graph.fake_mode.shape_env).items():
        if symbol in graph.symbols:
            raise SizeError(
                f"{graph.symbols[symbol]} ({graph.size_names[symbol]}) was fixed to {size} while pieces were built; "
                f"{VIEW_MUTATION_HINT}"
            )
    limit = MAX_SIZE
    for guard, sloc in dict(_guards(graph)[first:]).items():
        valid_up_to = _valid_up_to(guard, graph.symbols, _is_branch(sloc))
        if valid_up_to < _MIN_VALID_SIZE:
            where, code = user_location(sloc)
            condition = condition_text(guard, graph.size_names)
            origin = f"`{condition}` in `{code}`" if code else f"`{condition}`"
            raise SizeError(f"forward takes another path for a size of {valid_up_to + 1} ({origin})", where)
        limit = min(limit, valid_up_to)
    return limit


def _guards(graph: CapturedGraph) -> list[tuple[Any, Any]]:
    """The guards on sizes with their source locations, without those that choose the algorithm of a convolution: its result is
    the same."""
    shape_env = graph.fake_mode.shape_env
    if shape_env is None:
        return []
    return [
        (shape_env.replace(guard.expr), guard.sloc)
        for guard in shape_env.guards
        if not _is_made_by(guard.sloc, "conv", "/torch/_subclasses/fake_impls.py")
    ]


def _is_branch(sloc: Any) -> bool:
    """Whether a branch in forward's own code made the guard, and not an operation of torch."""
    place = str(getattr(sloc, "framework_loc", "")).replace("\\", "/")
    return "/torch/_dynamo/" in place or "/compiler/eager_semantics/branches.py" in place


def _valid_up_to(guard: Any, symbols: Mapping[str, str], equal: bool) -> int:
    """The size up to which a guard is true for all combinations of the dynamic sizes.

    Args:
        equal: also for two names of the same size; a guard of an operation against that selects the general path, which is
        valid.
    """
    names, is_true = _names(guard, symbols), _condition(guard, symbols)

    def holds(largest: int) -> bool:
        """Whether the guard is true for all combinations with this largest size."""
        if equal:
            others = itertools.product([size for size in sizes if size <= largest], repeat=len(names) - 1)
        else:
            others = itertools.permutations([size for size in sizes if size < largest], len(names) - 1)
        points = ((*rest[:at], largest, *rest[at:]) for rest in others for at in range(len(names)))
        return all(is_true(dict(zip(names, point, strict=True))) for point in points)

    sizes = _probe_sizes(guard, len(names))
    valid = 1
    for size in sizes if names else ():
        if not holds(size):
            return _bisect(holds, valid, size)
        valid = size
    return MAX_SIZE if names or guard != False else 1  # noqa: E712  sympy's false is not False


def _probe_sizes(guard: Any, num_names: int) -> list[int]:
    """The sizes at which a guard is evaluated: small, powers of 2, around its own numbers; fewer for several names."""
    own = {abs(int(number)) for number in guard.atoms(sympy.Integer)}
    own |= {one * other for one, other in itertools.combinations(sorted(own), 2)}
    about = {number + step for number in {*own, 8, 16, 32, 64, 128} for step in (-1, 0, 1)}
    powers = {1 << power for power in range(MAX_SIZE.bit_length())}
    sizes = sorted(
        size for size in {*about, *powers, *range(_EXHAUSTIVE_LIMIT if num_names == 1 else 8)} if 2 <= size <= MAX_SIZE
    )
    return sizes if num_names < 3 else sizes[:: 3 ** (num_names - 2)]


def _is_true_at_one(guard: Any, symbols: Mapping[str, str]) -> bool:
    """Whether a guard is true for distinct sizes from 1 upwards, in ascending and descending order."""
    names, is_true = _names(guard, symbols), _condition(guard, symbols)
    small = range(1, 1 + len(names))
    return all(is_true(dict(zip(names, sizes, strict=True))) for sizes in (small, small[::-1]))


def _names(guard: Any, symbols: Mapping[str, str]) -> list[str]:
    """The caller's names of the sizes in a guard; the symbol for a size without a name."""
    return sorted({symbols.get(str(symbol), str(symbol)) for symbol in guard.free_symbols})


def _condition(guard: Any, symbols: Mapping[str, str]) -> Callable[[Mapping[str, int]], bool]:
    """A function that tells whether a guard is true or undecided for sizes by name.

    It is Python code where torch can print that: sympy takes 0.1 ms for a condition, which is evaluated at hundreds of sizes.
    """
    names = {str(symbol): symbols.get(str(symbol), str(symbol)) for symbol in guard.free_symbols}
    try:
        code = compile(PythonPrinter().doprint(guard), "<guard>", "eval")
    except Exception:  # a function that torch cannot print, or a symbol that is no identifier
        return partial(_is_true, guard, symbols)

    def is_true(sizes: Mapping[str, int]) -> bool:
        try:
            return bool(eval(code, {"math": math}, {symbol: sizes[name] for symbol, name in names.items()}))
        except Exception:  # a division by zero, or a name of sympy's
            return _is_true(guard, symbols, sizes)

    return is_true


def _is_true(guard: Any, symbols: Mapping[str, str], sizes: Mapping[str, int]) -> bool:
    """Whether a guard is true or undecided for these sizes by name."""
    values = {symbol: sizes[symbols.get(str(symbol), str(symbol))] for symbol in guard.free_symbols}
    try:
        return guard.xreplace(values) != False  # noqa: E712  sympy's false is not False
    except ZeroDivisionError:  # `T % (T // 2)` for one row, where forward divides by zero as well
        return False


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number for which `holds`, which is true at `low` and false at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
