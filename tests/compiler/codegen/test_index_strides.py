"""Strides of indices in loops of Inductor's C++ backend."""

from __future__ import annotations

import pytest
import sympy
from torch._inductor import sizevars
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv

from torchweave.compiler.codegen.index_strides import zero_strides_early

LOOP, SIZE = sympy.Symbol("x0", integer=True), sympy.Symbol("s0", integer=True, positive=True)


def test_a_size_is_not_simplified(monkeypatch: pytest.MonkeyPatch) -> None:
    def simplify(*_: object) -> None:
        raise AssertionError("sympy may take minutes for a size")

    monkeypatch.setattr(sizevars, "simplify_index_in_vec_range", simplify)
    sizevars.stride_at_vec_range.cache_clear()
    size = FloorDiv(SIZE - 1, 2) * 12345
    with pytest.raises(AssertionError, match="minutes"):
        cpp.stride_at_vec_range(size, LOOP, 16)
    with zero_strides_early():
        assert cpp.stride_at_vec_range(size, LOOP, 16) == 0


@pytest.mark.parametrize(
    "index", [LOOP, 4 * LOOP + SIZE, SIZE * LOOP, FloorDiv(LOOP, 16) + SIZE, FloorDiv(SIZE, 2), sympy.S.One]
)
def test_strides_are_those_of_inductor(index: sympy.Expr) -> None:
    expected = cpp.stride_at_vec_range(index, LOOP, 16)
    with zero_strides_early():
        assert cpp.stride_at_vec_range(index, LOOP, 16) == expected
