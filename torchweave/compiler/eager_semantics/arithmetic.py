"""Let Inductor compute what eager code computes for every value and dtype: exact identities, division, products of integers.

x + 0.0                        Inductor (2.13) returns x, which for -0.0 is another number; eager code gives 0.0
x * 0                          0, also for NaN and infinity, where eager code gives NaN
x // y, x % y of floats        floor(x / y), which rounds up: 1.0 // 0.1 is 9.0 in eager code
bmm, mm, addmm of integers     a sum, whose dtype is int64, where one of the operands is a row or a column
addmm by beta or alpha of 0     NaN of an operand that eager code does not read, where the other is one row
cumsum(ones, dtype=...)        an arange of the dtype of the ones
a tensor with one float64      an error without a text: a restart of Dynamo, which has long ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torchweave.compiler.ir.symbols import value

aten = torch.ops.aten

_FLOOR_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_PRODUCTS = (aten.bmm.default, aten.mm.default, aten.addmm.default)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """See the module's text; for the pieces that Inductor builds in the body."""
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor import decomposition, graph
    from torch._inductor.fx_passes import joint_graph

    folder: Any = joint_graph.UniformValueConstantFolder
    find_zeros, remove_no_ops = folder._add_peephole_patterns, joint_graph.remove_no_ops

    def find_exact_zeros(self: Any) -> None:
        find_zeros(self)
        for node in [each for each in self.node_replacements if not _is_exact(value(each))]:
            for table in (self.node_replacements, self.node_replacements_shapes, self.constant_data_ptrs):
                table.pop(node, None)

    def remove_exact_no_ops(gm: Any, zeros: Any, ones: Any) -> None:
        remove_no_ops(gm, type(zeros)(each for each in zeros if _is_exact(value(each))), ones)

    tables = (decomposition.decompositions, decomposition.select_decomp_table())
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(mock.patch.dict(table, _decompositions(table)))
        for owner, name, function in (
            (folder, "_add_peephole_patterns", find_exact_zeros),
            (joint_graph, "remove_no_ops", remove_exact_no_ops),
            (graph_compile, "tensorify_python_scalars", lambda *args: None),
            (graph.GraphLowering, "call_function", _keep_result_dtype(graph.GraphLowering.call_function)),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(_checked_cumsum())
        yield


def _keep_result_dtype(call: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's lowering of a call, whose result has the dtype that the graph says."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        result = call(self, target, args, kwargs)
        expected = getattr(V.get_current_node(), "meta", {}).get("val")
        if isinstance(result, ir.TensorBox) and isinstance(expected, Tensor) and result.get_dtype() != expected.dtype:
            return lowering.to_dtype(result, expected.dtype)
        return result

    return call_function


def _is_exact(fake: Any) -> bool:
    """Whether zeros of a tensor's dtype are neutral and absorbing for every value."""
    return isinstance(fake, Tensor) and not (fake.dtype.is_floating_point or fake.dtype.is_complex)


def _decompositions(table: Any) -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions that are replaced, by op."""
    replaced: dict[Any, Callable[..., Any]] = {op: _floats_only(table[op]) for op in _PRODUCTS if op in table}
    for op in _FLOOR_DIVISIONS:
        replaced[op] = _divide_by_mode(table.get(op))
    replaced[aten.floor_divide.default] = _floor_divide
    for op in (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor):
        replaced[op] = _remainder
    replaced[aten.ldexp.Tensor] = lambda one, other: one * torch.pow(2.0, other)
    return replaced


def _floats_only(decompose: Callable[..., Any]) -> Callable[..., Any]:
    def decompose_floats(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Tensor) and _is_exact(each) for each in args):
            return NotImplemented
        if 0 in (kwargs.get("beta", 1), kwargs.get("alpha", 1)):
            return NotImplemented
        return decompose(*args, **kwargs)

    return decompose_floats


def _is_float(*operands: Any) -> bool:
    return any(
        each.dtype.is_floating_point if isinstance(each, Tensor) else isinstance(each, (float, torch.SymFloat))
        for each in operands
    )


def _divide_by_mode(decompose: Callable[..., Any] | None) -> Callable[..., Any]:
    def divide(one: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
        if rounding_mode == "floor" and _is_float(one, other):
            return _divide_floats(one, other)
        return NotImplemented if decompose is None else decompose(one, other, rounding_mode=rounding_mode)

    return divide


def _floor_divide(one: Any, other: Any) -> Any:
    if _is_float(one, other):
        return _divide_floats(one, other)
    return aten.div.Tensor_mode(one, other, rounding_mode="floor")


def _divide_floats(one: Any, other: Any) -> Tensor:
    """The quotient rounded down, from the exact remainder, as in torch's own kernels."""
    dtype = torch.result_type(one, other)
    one, other = _operands(one, other)
    rest = torch.fmod(one, other)
    quotient = (one - rest) / other
    quotient = torch.where((rest != 0) & ((other < 0) != (rest < 0)), quotient - 1, quotient)
    rounded = torch.floor(quotient)
    rounded = torch.where(quotient - rounded > 0.5, rounded + 1, rounded)
    plain = one / other
    rounded = torch.where(quotient != 0, rounded, torch.copysign(torch.zeros_like(plain), plain))
    return torch.where(other != 0, rounded, plain).to(dtype)


def _remainder(one: Any, other: Any) -> Any:
    """The remainder with the sign of the divisor, from the exact one with the sign of the dividend."""
    if not _is_float(one, other):
        return NotImplemented
    dtype = torch.result_type(one, other)
    one, other = _operands(one, other)
    rest = torch.fmod(one, other)
    return torch.where((rest != 0) & ((rest < 0) != (other < 0)), rest + other, rest).to(dtype)


def _operands(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    """Both operands as tensors of the dtype in which torch's kernels compute."""
    rounded = torch.result_type(one, other)  # that of numbers, as torch's kernels round them
    dtype = torch.float32 if rounded in (torch.float16, torch.bfloat16) else rounded
    device = next(each.device for each in (one, other) if isinstance(each, Tensor))
    first, second = (
        each.to(dtype) if isinstance(each, Tensor) else aten.scalar_tensor(each, dtype=rounded, device=device).to(dtype)
        for each in (one, other)
    )
    return first, second


@contextmanager
def _checked_cumsum() -> Iterator[None]:
    """Leave a cumsum over a constant tensor that returns another dtype than the constant's as it is."""
    from torch._inductor.fx_passes import post_grad

    entries = {
        id(entry): entry
        for each in post_grad.pass_patterns
        for found in each.patterns.values()
        for entry in found
        if getattr(getattr(entry, "handler", None), "__name__", "") == "pointless_cumsum_replacement"
    }
    with ExitStack() as stack:
        for entry in entries.values():
            stack.enter_context(mock.patch.object(entry, "extra_check", _keeps_dtype(entry.extra_check)))
        yield


def _keeps_dtype(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check_dtype(match: Any) -> bool:
        made, dtype = value(match.output_node()).dtype, match.kwargs["dtype"]
        expected = dtype if dtype.is_floating_point or dtype.is_complex else torch.int64
        return made == expected and check(match)

    return check_dtype
