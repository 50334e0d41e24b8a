"""Decide relations between sizes that torch leaves open, such as `T // 2 <= T`.

    v[v.shape[0] // 2 :, 1:5] = x       # torch: T // 2 <= T is not known, so the slice has max(0, T - min(T, T // 2)) rows

A side of a relation of one size T consists of sums, integer multiples, floor divisions by integers, minima and maxima. Let P be
a multiple of all divisors. For the sizes T = P * q + r of one remainder r each part of it is a line in q with an integer slope, up
to the points where a minimum or maximum passes from one line to another. Lines with integer slopes whose constants are at most M
cross at q <= 2 * M. Beyond, the difference of the sides is one line for each remainder: the relation holds for all sizes when
it holds for each size up to there and these lines do not lead back to 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

_MAX_SIZES = 4096
"""Relations that need more sizes are left open."""
_HOLDS: dict[Any, Callable[[int, int], bool]] = {
    sympy.Ge: lambda difference, step: difference >= 0 and step >= 0,
    sympy.Gt: lambda difference, step: difference > 0 and step >= 0,
    sympy.Le: lambda difference, step: difference <= 0 and step <= 0,
    sympy.Lt: lambda difference, step: difference < 0 and step <= 0,
    sympy.Eq: lambda difference, step: difference == 0 == step,
    sympy.Ne: lambda difference, step: difference * step >= 0 and difference != 0,
}
"""Whether a relation holds for a difference of its sides that changes by `step` from one q to the next, for all of them."""


class _UnknownError(Exception):
    """A part of a relation is none of those that the module's text names."""


def static_answer(condition: torch.SymBool) -> bool | None:
    """Whether a condition holds for all sizes from 1 on; False when it holds for none, None when neither is shown."""
    shape_env = condition.node.shape_env
    known = getattr(shape_env, "backed_var_to_val", {})
    expr = condition.node.expr
    if not all(symbol in known or shape_env.var_to_range[symbol].lower >= 1 for symbol in expr.free_symbols):
        return None  # a number that depends on data may be 0
    return decide(expr)


def resolve_index(size: Any, index: Any) -> Any:
    """The index of a slice, as eager code reads it, where its sign differs between sizes: `-(T // 2)` is 0 for T = 1."""
    is_negative = torch.sym_min(1, torch.sym_max(0, -index))
    return torch.sym_max(0, torch.sym_min(size, index + size * is_negative))


@functools.lru_cache(1024)
def decide(condition: Any) -> bool | None:
    """As `static_answer`, of sympy's expression of a condition."""
    if isinstance(condition, (sympy.And, sympy.Or)):
        answers = {decide(each) for each in condition.args}
        final = isinstance(condition, sympy.Or)  # one true part decides an `or`, one false part an `and`
        return final if final in answers else None if None in answers else not final
    if type(condition) not in _HOLDS or len(condition.free_symbols) != 1:
        return None
    try:
        period = _period(condition)
        constants = sum(_magnitude(side, period) for side in condition.args)
        limit = period * 2 * constants if condition.has(Min, Max) else 0
        if limit + 2 * period > _MAX_SIZES:
            return None
        sizes = range(1, limit + 2 * period + 1)
        differences = [_value(condition.lhs, size) - _value(condition.rhs, size) for size in sizes]
    except _UnknownError:
        return None
    # Of the sizes up to `limit` each is looked at itself, of those above a first one of each remainder and the slope of its line.
    steps = [0] * limit + [differences[at + period] - differences[at] for at in range(limit, limit + period)]
    for kind, answer in ((type(condition), True), (type(sympy.Not(condition)), False)):
        if all(_HOLDS[kind](difference, step) for difference, step in zip(differences, steps, strict=False)):
            return answer
    return None


def _period(part: Any) -> int:
    """A number of sizes after which every division of a part has the same remainder again."""
    inner = math.lcm(*map(_period, part.args)) if part.args else 1
    return inner * _divisor(part) if isinstance(part, (FloorDiv, Mod, PythonMod)) else inner


def _divisor(part: Any) -> int:
    if not part.args[1].is_Integer or part.args[1] < 1:
        raise _UnknownError
    return int(part.args[1])


def _magnitude(part: Any, period: int) -> int:
    """A bound on the constants of a part's lines."""
    if part.is_Symbol:
        return period
    if part.is_Integer:
        return abs(int(part))
    inner = [_magnitude(each, period) for each in part.args]
    if isinstance(part, sympy.Add):
        return sum(inner)
    if isinstance(part, sympy.Mul) and sum(not each.is_Integer for each in part.args) == 1:
        return math.prod(inner)
    if isinstance(part, (FloorDiv, Mod, PythonMod)):
        return inner[0] + _divisor(part)
    if isinstance(part, (Min, Max)):
        return max(inner)
    raise _UnknownError


def _value(part: Any, size: int) -> int:
    if part.is_Symbol:
        return size
    if part.is_Integer:
        return int(part)
    return _OPERATIONS[type(part)]([_value(each, size) for each in part.args])


_OPERATIONS: dict[Any, Callable[[list[int]], int]] = {
    sympy.Add: sum,
    sympy.Mul: math.prod,
    FloorDiv: lambda pair: operator.floordiv(*pair),
    Mod: lambda pair: operator.mod(*pair),
    PythonMod: lambda pair: operator.mod(*pair),
    Min: min,
    Max: max,
}
