"""A short run of `fuzz.py`: random modules as FX code against eager."""

from __future__ import annotations

import pytest

from tests.compiler import fuzz


@pytest.mark.parametrize("seed", range(700, 712))
def test_a_random_module_is_right_or_refused(seed: int) -> None:
    program = fuzz.make(seed)
    outcome, why = fuzz.run(program)
    assert outcome not in ("wrong", "crashed"), f"{why}\n{program.code}"
