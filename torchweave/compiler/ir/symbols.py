"""Symbolic sizes: mark the dynamic dimensions of inputs, and read symbols and fake values of nodes.

The caller names each dynamic dimension (`T`, `N`). Dimensions with one name always have the same size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx

from torchweave.compiler.errors import name_sizes
from torchweave.config.options import DynamicShapes

DynamicDims = Mapping[str, Mapping[int, str]]
SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)

_PRIMES = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)


def value(node: fx.Node) -> Any:
    """The fake tensor or symbolic size that the node computes."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_size(node: fx.Node) -> bool:
    """Whether the node is a size or an expression over sizes, which every piece can recompute."""
    return (
        node.op in ("call_function", "call_method")
        and isinstance(value(node), SYMBOLIC)
        and all(isinstance(value(argument), torch.SymInt) for argument in node.all_input_nodes)
    )


def token_count(symbols: Mapping[str, str]) -> str | None:
    """The symbol of the token count: the size named T, else the first dynamic size; None without dynamic sizes."""
    return next((symbol for symbol, name in symbols.items() if name == "T"), next(iter(symbols), None))


def expression(size: Any) -> Any:
    """The expression of a symbolic size, which can be compared and hashed; a number is returned as it is."""
    return size.node.expr if isinstance(size, SYMBOLIC) else size


def size_at(size: Any, number: int) -> int:
    """A size, or the expression of one, with every symbol set to a number."""
    symbolic = sympy.sympify(expression(size))
    return int(symbolic.xreplace(dict.fromkeys(symbolic.free_symbols, sympy.Integer(number))))


def symbol_name(size: Any) -> str | None:
    """The name of a size's symbol; None when it is a number or an expression."""
    if not isinstance(size, torch.SymInt):
        return None
    return str(size.node.expr) if size.node.expr.is_symbol else None


def condition_text(condition: Any, names: Mapping[str, str]) -> str:
    """A condition on sizes as the user writes it: `(tokens.shape[0] % 2) == 0`; `names` as of `name_sizes`."""
    from torch.utils._sympy.printers import PythonPrinter

    return name_sizes(PythonPrinter().doprint(condition), names)


def fixed_sizes(shape_env: Any) -> dict[str, int]:
    """Symbols that the shape environment replaced by a number, with that number."""
    replacements = getattr(shape_env, "replacements", {})
    return {str(symbol): int(size) for symbol, size in replacements.items() if size.is_number}


def free_symbols(thing: Any) -> set[str]:
    """Names of all symbols in a size, a fake tensor's shape and strides, a slice, or nested tuples and lists of them."""
    if isinstance(thing, SYMBOLIC):
        return {str(symbol) for symbol in thing.node.expr.free_symbols}
    if isinstance(thing, Tensor):
        return free_symbols([*thing.shape, *thing.stride(), thing.storage_offset()])
    if isinstance(thing, (tuple, list)):
        return set().union(*map(free_symbols, thing))
    if isinstance(thing, slice):
        return free_symbols((thing.start, thing.stop, thing.step))
    return set()


def choose_size_hints(
    inputs: Mapping[str, Tensor], dynamic: DynamicDims, static_sizes: Iterable[int]
) -> dict[str, int]:
    """A size to trace with for each dynamic name.

    The example's size is used when it is at least 2 and differs from every other name's and from the sizes of weights: equal
    sizes would tie the dimension to a constant.
    """
    taken, hints = {1, *static_sizes}, {}
    taken.update(
        size
        for name, tensor in inputs.items()
        for dim, size in enumerate(tensor.shape)
        if dim not in dynamic.get(name, {})
    )
    for name, dims in dynamic.items():
        for dim, size_name in dims.items():
            if size_name in hints:
                continue
            candidates = (inputs[name].shape[dim], *_PRIMES)
            hint = next((size for size in candidates if size >= 2 and size not in taken), max(taken) + 1)
            hints[size_name] = hint
            taken.add(hint)
    return hints


def example(tensor: Tensor, dims: Mapping[int, str], hints: Mapping[str, int]) -> Tensor:
    """A contiguous tensor of zeros like `tensor`, with dynamic dimensions of the hinted sizes."""
    shape = [hints[dims[dim]] if dim in dims else size for dim, size in enumerate(tensor.shape)]
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def mark(tensor: Tensor, dims: Mapping[int, str], mode: DynamicShapes) -> None:
    """Mark the dynamic dimensions of an example for Dynamo."""
    from torch._dynamo import mark_dynamic
    from torch._dynamo.decorators import mark_unbacked

    parameters = inspect.signature(mark_unbacked).parameters  # they differ between versions of torch
    for dim, name in dims.items():
        if mode == "unbacked":
            options = {"shape_id": name, "hint_override": tensor.shape[dim], "min": 1}
            mark_unbacked(tensor, dim, **{key: option for key, option in options.items() if key in parameters})
        else:
            mark_dynamic(tensor, dim)


@contextlib.contextmanager
def record_size_names(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, str]]:
    """While Dynamo traces, fill a dict with the name of each symbol of an input's size: `s52 -> tokens.shape[0]`.

    An error that tracing raises holds symbols and no graph.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from_tensor: Any = FakeTensorMode.from_tensor
    names: dict[str, str] = {}

    def from_input(self: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        fake = from_tensor(self, tensor, *args, **kwargs)
        name = next((name for name, each in inputs.items() if each is tensor), None)
        for dim, size in enumerate(fake.shape if name is not None else ()):
            if (symbol := symbol_name(size)) is not None:
                names.setdefault(symbol, f"{name}.shape[{dim}]")
        return fake

    with mock.patch.object(FakeTensorMode, "from_tensor", from_input):
        yield names
