"""Index a tensor by a size beside other indices, or by a list with sizes.

Before    m[n // 2, 1:3] = x                 m[[0, n // 2]]                     m[1:] = x[1:]
After     m.select(0, n // 2)[1:3] = x       m[torch.tensor([0, n // 2])]       m[1:].copy_(x[1:])

torch reads an integer in a tuple of indices as a Python number, which fixes the size. Dynamo selects where the size is the only
index, `m[n // 2]`; the same holds beside others, since torch selects by each integer before it applies tensors of indices. A list
of integers is the tensor of them. A write by slices asks whether leading sizes of the value are one, which would exclude a size of
2 above, though it copies either way.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import torch

from torchweave.compiler.eager_semantics.branches import replace_tensor_method


@contextmanager
def select_by_sizes() -> Iterator[None]:
    """See the module's text; for the reads and writes that Dynamo traces."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.tensor import TensorVariable

    insert: Any = BuiltinVariable._handle_insert_op_in_graph
    write: Any = TensorVariable.method___setitem__

    def insert_op(self: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.getitem and isinstance(args[0].realize(), TensorVariable):
            args = _selected(tracer, args[0].realize(), _with_tensors(tracer, args[0].realize(), args[1].realize()))
        return insert(self, tracer, args, kwargs)

    def write_selected(self: Any, tracer: Any, key: Any, value: Any) -> Any:
        tensor, key = _selected(tracer, self, _with_tensors(tracer, self, key.realize()))
        part = _written_part(tracer, tensor, key, value.realize())
        if part is None:
            return write(tensor, tracer, key, value)
        part.call_method(tracer, "copy_", [value], {})
        return ConstantVariable.create(None)

    with (
        mock.patch.object(BuiltinVariable, "_handle_insert_op_in_graph", insert_op),
        replace_tensor_method("__setitem__", write_selected),
    ):
        yield


@contextmanager
def unpack_sizes() -> Iterator[None]:
    """Let Dynamo trace `torch.Tensor(x.size())` as a tensor of that size.

    A graph holds a size as a tuple of numbers (torch 2.13), and `torch.Tensor((4, 6))` is a tensor of these two numbers. The sizes
    are given one by one, as in `torch.Tensor(4, 6)`.
    """
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


def _with_tensors(tracer: Any, tensor: Any, key: Any) -> Any:
    """An index with a size somewhere, whose lists of integers are tensors; Dynamo's variables."""
    from torch._dynamo.variables import ConstantVariable, ListVariable, TorchInGraphFunctionVariable, TupleVariable

    items = [item.realize() for item in key.items] if isinstance(key, TupleVariable) else [key]
    lists = {
        i: [each.realize() for each in item.items] for i, item in enumerate(items) if isinstance(item, ListVariable)
    }
    if not any(map(_is_size, [*items, *chain(*lists.values())])):
        return key
    device = {"device": ConstantVariable.create(tensor.device)}
    for i, numbers in lists.items():
        if all(map(_is_number, numbers)):
            items[i] = TorchInGraphFunctionVariable(torch.tensor).call_function(tracer, [items[i]], device)
    return TupleVariable(items) if isinstance(key, TupleVariable) else items[0]


def _selected(tracer: Any, tensor: Any, key: Any) -> tuple[Any, Any]:
    """A tensor selected by the sizes in a tuple of indices, and the other indices; Dynamo's variables."""
    from torch._dynamo.variables import ConstantVariable, TupleVariable

    items = [item.realize() for item in key.items] if isinstance(key, TupleVariable) else []
    if not any(map(_is_size, items)):
        return tensor, key
    used = [num for num in map(_num_dims, items) if num is not None]
    if len(used) < len(items) or tensor.ndim is None:
        return tensor, key
    first, dims = 0, []
    for item, num in zip(items, used, strict=True):
        if _is_size(item):
            dims.append(first)
        first += tensor.ndim - sum(used) if item.is_constant_match(...) else num
    sizes = [item for item in items if _is_size(item)]
    for dim, size in reversed(list(zip(dims, sizes, strict=True))):
        tensor = tensor.call_method(tracer, "select", [ConstantVariable.create(dim), size], {})
    rest = [item for item in items if not _is_size(item)] or [ConstantVariable.create(...)]
    return tensor, TupleVariable(rest)


def _written_part(tracer: Any, tensor: Any, key: Any, value: Any) -> Any | None:
    """The view that a write by slices writes to, where its value has dynamic sizes; None for other writes. Dynamo's variables."""
    from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SliceVariable, TensorVariable, TupleVariable

    items = [item.realize() for item in key.items] if isinstance(key, TupleVariable) else [key.realize()]
    plain = all(
        isinstance(item, SliceVariable) or (isinstance(item, ConstantVariable) and not isinstance(item.value, bool))
        for item in items
    )
    if not (plain and isinstance(value, TensorVariable)):
        return None
    fake = value.proxy.node.meta.get("example_value")
    if fake is None or not any(isinstance(size, torch.SymInt) for size in fake.shape):
        return None
    part = BuiltinVariable(operator.getitem).call_function(tracer, [tensor, key], {})
    return part if isinstance(part, TensorVariable) and part.ndim is not None and value.ndim <= part.ndim else None


def _is_size(item: Any) -> bool:
    from torch._dynamo.variables.tensor import SymNodeVariable

    return isinstance(item, SymNodeVariable) and isinstance(item.sym_num, torch.SymInt)


def _is_number(item: Any) -> bool:
    """Whether an index is an integer or a size."""
    from torch._dynamo.variables import ConstantVariable

    return _is_size(item) or (isinstance(item, ConstantVariable) and type(item.value) is int)


def _num_dims(item: Any) -> int | None:
    """The number of dimensions that an index reads, none for `...`; None where it is not known."""
    from torch._dynamo.variables import SliceVariable, TensorVariable

    if item.is_constant_match(None, ...):
        return 0
    if isinstance(item, TensorVariable):
        return item.ndim if item.dtype in (torch.bool, torch.uint8) else 1
    return 1 if _is_number(item) or isinstance(item, SliceVariable) else None
