"""Symbolic sizes: which dimensions of the inputs are dynamic, how they are marked, and how they are read back.

A dynamic dimension has a name that the caller chose (`T`, `N`). Two dimensions with one name always have one size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.config.options import DynamicShapes

DynamicDims = Mapping[str, Mapping[int, str]]

_PRIMES = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)


def value(node: fx.Node) -> Any:
    """What the node computes, as the fake tensor or symbolic size that tracing saw."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_size(node: fx.Node) -> bool:
    """Whether the node is a size or an expression over sizes, which any piece can compute for itself."""
    return (
        node.op in ("call_function", "call_method")
        and isinstance(value(node), (torch.SymInt, torch.SymBool, torch.SymFloat))
        and all(isinstance(value(argument), torch.SymInt) for argument in node.all_input_nodes)
    )


def token_count(symbols: Mapping[str, str]) -> str | None:
    """The symbol that is the token count: what the caller calls T, else the first dynamic size; None when there is none."""
    return next((symbol for symbol, name in symbols.items() if name == "T"), next(iter(symbols), None))


def expression(size: Any) -> Any:
    """What a symbolic size computes, to be compared and hashed; a number is itself."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat)) else size


def symbol_name(size: Any) -> str | None:
    """The name of the symbol that a size is, or None when it is a number or an expression."""
    if not isinstance(size, torch.SymInt):
        return None
    return str(size.node.expr) if size.node.expr.is_symbol else None


def fixed_sizes(shape_env: Any) -> dict[str, int]:
    """Symbols that turned out to be a number, for whichever reason, and that number."""
    known = getattr(shape_env, "replacements", {})
    return {str(symbol): int(size) for symbol, size in known.items() if size.is_number}


def free_symbols(thing: Any) -> set[str]:
    """Names of all symbols in a size, a fake tensor's shape and strides, or a nest of them."""
    if isinstance(thing, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return {str(symbol) for symbol in thing.node.expr.free_symbols}
    if isinstance(thing, Tensor):
        return free_symbols([*thing.shape, *thing.stride(), thing.storage_offset()])
    if isinstance(thing, (tuple, list)):
        return set().union(*map(free_symbols, thing))
    return set()


def choose_size_hints(
    inputs: Mapping[str, Tensor], dynamic: DynamicDims, static_sizes: Iterable[int]
) -> dict[str, int]:
    """A size to trace with for each dynamic name.

    The example's own size is kept when it is at least 2, and equals neither another name's nor a size of the weights: a
    coincidence of sizes would tie the dimension to a constant.
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
    """A contiguous tensor of zeros like `tensor`, its dynamic dimensions as large as their hints."""
    shape = [hints[dims[dim]] if dim in dims else size for dim, size in enumerate(tensor.shape)]
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def mark(tensor: Tensor, dims: Mapping[int, str], mode: DynamicShapes) -> None:
    """Tell Dynamo which dimensions of an example are dynamic."""
    from torch._dynamo import mark_dynamic
    from torch._dynamo.decorators import mark_unbacked

    known = inspect.signature(mark_unbacked).parameters
    for dim, name in dims.items():
        if mode == "unbacked":
            wanted = {"shape_id": name, "hint_override": tensor.shape[dim], "min": 1}
            mark_unbacked(tensor, dim, **{key: wanted[key] for key in wanted if key in known})
        else:
            mark_dynamic(tensor, dim)


@contextlib.contextmanager
def dynamic_shapes_mode(mode: DynamicShapes) -> Iterator[None]:
    """Trace and build under the rules of one `dynamic_shapes` mode."""
    from torch.fx.experimental import _config

    symbolic_config: Any = _config

    with symbolic_config.patch(backed_size_oblivious=mode == "backed_size_oblivious"):
        yield
