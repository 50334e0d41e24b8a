"""Let the code that Inductor generates read sizes from the shapes of its inputs.

A piece has no inputs for sizes. From torch 2.14 on Inductor takes a size from the shape of an input only where it asserts
that shape (`config.size_asserts`), which costs a microsecond for each input of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def bind_size_symbols() -> Iterator[None]:
    """Bind every size symbol of an input's shape in the code that is generated in the body, without asserts on the shapes."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    codegen_inputs = PythonWrapperCodegen.codegen_inputs

    def codegen_inputs_with_sizes(self: Any) -> None:
        with config.patch(size_asserts=True):
            codegen_inputs(self)

    with mock.patch.object(PythonWrapperCodegen, "codegen_inputs", codegen_inputs_with_sizes):
        yield
