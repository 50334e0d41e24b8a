"""`decide` against the values of a relation at many sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sympy
from torch.utils._sympy import functions

from torchweave.compiler.ir.size_relations import decide

FloorDiv: Any = functions.FloorDiv
Max: Any = functions.Max
Min: Any = functions.Min
Mod: Any = functions.Mod

T: Any = sympy.Symbol("T", positive=True, integer=True)
S: Any = sympy.Symbol("S", positive=True, integer=True)


@pytest.mark.parametrize(
    ("relation", "answer"),
    [
        (FloorDiv(T, 2) <= T, True),
        (FloorDiv(T, 3) <= T - 1, True),
        (FloorDiv(T, 2) <= T - 1, True),
        (FloorDiv(T, 2) < FloorDiv(T, 3), False),
        (Max(0, T - Min(T, FloorDiv(T, 2))) >= 1, True),
        (sympy.Eq(Mod(8 * FloorDiv(T, 3) + 2, 8), 2), True),
        (sympy.And(FloorDiv(T, 3) >= 0, FloorDiv(T, 3) <= T), True),
        (sympy.And(FloorDiv(T, 3) >= 1, FloorDiv(T, 3) > T), False),
        (FloorDiv(T, 2) >= 1, None),  # not for 1
        (T - 1000 * FloorDiv(T, 1000) < 999, None),
        (2000 - T > 0, None),  # for small sizes only
        (2048 * FloorDiv(T, 2) <= 6144 * T - 4096, True),
        (FloorDiv(T, 2) <= S, None),
        (FloorDiv(T * T, 2) <= T, None),
    ],
)
def test_a_relation_is_decided_for_all_sizes(relation: Any, answer: bool | None) -> None:
    assert decide(relation) is answer


def test_random_relations_have_the_values_that_were_decided() -> None:
    draw = random.Random(0)
    answers = []
    for _ in range(400):
        relation = draw.choice((sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne, sympy.Ge))(_part(draw, 3), _part(draw, 3))
        if not isinstance(relation, sympy.core.relational.Relational):
            continue
        answer = decide(relation)
        answers.append(answer)
        values = [bool(relation.xreplace({T: sympy.Integer(size)})) for size in (*range(1, 60), 1000, 1001, 10**6)]
        if answer is not None:
            assert all(value is answer for value in values), relation
    assert min(map(answers.count, (True, False))) > 40


def _part(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice((T, sympy.Integer(draw.randint(-3, 3))))
    one, other = _part(draw, depth - 1), _part(draw, depth - 1)
    make = (
        lambda: one + other,
        lambda: one - draw.randint(1, 3) * other,
        lambda: Min(one, other),
        lambda: Max(one, other),
        lambda: FloorDiv(one, sympy.Integer(draw.randint(2, 3))),
    )
    return draw.choice(make)()
