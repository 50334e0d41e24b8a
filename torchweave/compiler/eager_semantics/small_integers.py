"""Reductions and casts of 8-bit integers on a CPU by way of wider integers.

Before    amax(x: uint8, 0)                         convert(float -> uint8)
After     convert(amax(convert(x, int32), 0), uint8)    convert(convert(float -> int64), uint8)

When      Inductor's vectorized C++ code (2.13) begins minima, maxima and their positions of int8 and uint8 with a number of
          another range, or fills unused lanes with 0, so that 16 or more elements give another result; and it saturates a cast of
          a float that is out of range, where eager code wraps. Its code for extrema of int16 whose operand was computed in 32 bits
          does not compile.
Numerics  exact.
Cost      32 bits a lane instead of 8.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torchweave import version
from torchweave.compiler.ir.symbols import value

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default

_VALUES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_POSITIONS = (aten.argmax.default, aten.argmin.default)
_BOTH = (aten.max.dim, aten.min.dim, aten.aminmax.default)
_SMALL = (torch.int8, torch.uint8)
_REDUCED = (*_SMALL, torch.int16)


class WidenSmallIntegers(CustomGraphPass):
    """See the module's text."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or not isinstance(fake := value(source), Tensor):
                continue
            if fake.device.type != "cpu":
                continue
            if node.target in (*_VALUES, *_POSITIONS, *_BOTH) and fake.dtype in _REDUCED:
                _widen(graph, node, source)
            elif node.target is _CONVERT and fake.dtype.is_floating_point and node.args[1] in _SMALL:
                with graph.inserting_before(node):
                    node.update_arg(0, _convert(graph, source, torch.int64))

    def uuid(self) -> Any:
        return version.package_source_hash()


def _convert(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = graph.call_function(_CONVERT, (source, dtype))
    with value(source).fake_mode:
        node.meta["val"] = _CONVERT(value(source), dtype)
    return node


def _widen(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    dtype = value(source).dtype
    with graph.inserting_before(node):
        node.update_arg(0, _convert(graph, source, torch.int32))
    if node.target in _POSITIONS:
        return
    if node.target in _VALUES:
        results = [node]
    else:
        values = (0,) if node.target is not aten.aminmax.default else (0, 1)
        results = [each for each in node.users if each.target is operator.getitem and each.args[1] in values]
    with value(source).fake_mode:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    for result in results:
        if result is not node:
            result.meta["val"] = node.meta["val"][result.args[1]]
        with graph.inserting_after(result):
            narrow = _convert(graph, result, dtype)
        result.replace_all_uses_with(narrow, delete_user_cb=lambda user, narrow=narrow: user is not narrow)
