"""Let Dynamo trace `torch.Tensor(x.size())` as a tensor of that size.

A graph holds a size as a tuple of numbers (torch 2.13), and `torch.Tensor((4, 6))` is a tensor of these two numbers. The sizes are
given one by one, as in `torch.Tensor(4, 6)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def unpack_sizes() -> Iterator[None]:
    """See the module's text; for the calls that Dynamo traces."""
    from torch._dynamo.variables.lists import SizeVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    call: Any = UserDefinedClassVariable.call_function

    def call_function(self: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and self.value in self._in_graph_classes():
            size = args[0].realize()
            args = size.items if isinstance(size, SizeVariable) else args
        return call(self, tracer, args, kwargs)

    with mock.patch.object(UserDefinedClassVariable, "call_function", call_function):
        yield
