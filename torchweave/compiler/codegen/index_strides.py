"""Strides of indices without the loop's symbol in Inductor's C++ backend: 0, without simplification by sympy.

Inductor (2.13) simplifies an index by sympy before it looks for the symbol. An index is a size alone where code multiplies by
it: TensorRT-LLM's next power of two of a number of tokens is six shifts, each inside the next, for which sympy takes 100 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def zero_strides_early() -> Iterator[None]:
    """Return 0 at once for such an index while code is generated in the body; the strides stay the same."""
    import sympy
    from torch._inductor.codegen import cpp

    stride_at = cpp.stride_at_vec_range  # pyright: ignore[reportPrivateImportUsage]

    def stride(index: Any, symbol: Any, *lanes: Any) -> Any:
        return stride_at(index, symbol, *lanes) if index.has(symbol) else sympy.S.Zero

    with mock.patch.object(cpp, "stride_at_vec_range", stride):
        yield
