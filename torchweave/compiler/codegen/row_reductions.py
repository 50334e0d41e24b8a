"""Inductor's reductions of rows: in registers up to `MAX_ROW` numbers, where Inductor itself loops over rows above 1024.

A loop reads a row once for its sum and again for what follows, such as the normalized row of a LayerNorm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_ROW = 4096
"""Most numbers of a row that a Triton program keeps in its registers: 16 a thread of 8 warps."""


@contextmanager
def keep_rows_in_registers() -> Iterator[None]:
    """Let Inductor reduce contiguous rows of a known size up to `MAX_ROW` in one load (a persistent reduction).

    `config.triton.multi_kernel` would time both forms, which `standalone_compile` does not support.
    """
    import sympy
    from torch._inductor import config
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    choices: Any = copy.copy(V.choices)
    default_choice = choices.should_use_persistent_reduction

    def should_use_persistent_reduction(features: Any, cooperative: bool) -> bool:
        if default_choice(features, cooperative):
            return True
        numbers = features.reduction_numel
        return (
            config.triton.persistent_reductions
            and not cooperative
            and features.get_reduction_hint() == ReductionHint.INNER
            and isinstance(numbers, (int, sympy.Integer))
            and int(numbers) <= MAX_ROW
        )

    choices.should_use_persistent_reduction = should_use_persistent_reduction
    with V.set_choices_handler(choices):
        yield
