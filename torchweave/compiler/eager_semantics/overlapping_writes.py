"""Refuse writes that eager code refuses: to elements that share memory, and from a tensor that overlaps the target in part.

    a.expand(4, 3)[-1] = 3          three elements at one place
    a[1:] = a[:-1]                  a row is read after it was written

Compiled code has a value for these, which is not what eager code would give: it raises. Sizes are those of the examples.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from torchweave.compiler.errors import TraceError, source_location
from torchweave.compiler.ir.aliasing import AliasAnalysisError, analyze_aliasing
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.ir.symbols import expression, value

_CHECKED = frozenset({"copy", "fill", "zero"})
"""Operations beside the elementwise ones whose targets torch checks."""
_DEPRECATED = frozenset({"masked_fill"})
"""Elementwise operations of which torch only warns."""


def refuse_overlapping_writes(graph: CapturedGraph) -> None:
    """See the module's text.

    Raises:
        TraceError: with the line of the write.
    """
    writes = [(node, *found) for node in graph.graph.nodes if (found := _write(node, graph)) is not None]
    for node, target, _ in writes:
        if any(stride == 0 and size > 1 for size, stride in zip(*_geometry(target, graph)[:2], strict=True)):
            raise TraceError(
                "forward writes to a tensor of which several elements are one place in memory (`expand`), which eager code "
                "refuses; write to a copy of it (`clone()`)",
                source_location(node),
            )
    with_sources = [each for each in writes if any(isinstance(value(one), Tensor) for one in each[2])]
    if not with_sources:
        return
    try:
        with graph.without_guards():
            holds = analyze_aliasing(graph.graph, inputs_may_alias=False).holds
    except AliasAnalysisError:
        return
    for node, target, sources in with_sources:
        for source in sources:
            fake = value(source)
            if isinstance(fake, Tensor) and holds[source] & holds[node.args[0]] and _overlaps(target, fake, graph):  # type: ignore[index]
                raise TraceError(
                    "forward writes to a tensor from one that shares a part of its memory, which eager code refuses; read from "
                    "a copy of it (`clone()`)",
                    source_location(node),
                )


def _write(node: fx.Node, graph: CapturedGraph) -> tuple[Tensor, list[fx.Node]] | None:
    """The fake tensor that a node writes to as torch checks it, and the other tensors that it reads; None for other nodes."""
    if not mutated_args(node) or not isinstance(node.args[0] if node.args else None, fx.Node):
        return None
    target = value(node.args[0])  # type: ignore[arg-type]
    if not isinstance(target, Tensor):
        return None
    if node.target is operator.setitem:
        key: Any = fx.map_arg(node.args[1], value)
        items = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, (Tensor, list)) for each in items):
            return None  # a write by indices
        with graph.enable_fake_mode(), graph.without_guards():
            target = target[key]
    elif not _is_checked(node):
        return None
    others = [each for each in node.all_input_nodes if each is not node.args[0]]
    return target, others


def _is_checked(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in vars(operator).values():
        return True  # `+=` and others
    name = name.strip("_") if name.startswith("__") else name.removesuffix("_")
    if name in _CHECKED:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _DEPRECATED:
        return False
    return torch.Tag.pointwise in getattr(packet, packet.overloads()[0]).tags


def _geometry(fake: Tensor, graph: CapturedGraph) -> tuple[list[int], list[int], int]:
    """Sizes, strides and offset for the sizes of the examples."""
    values = graph.fake_mode.shape_env.backed_var_to_val

    def number(size: Any) -> int:
        known = sympy.sympify(expression(size)).xreplace(values)
        return int(known) if known.is_number else 1

    return [*map(number, fake.shape)], [*map(number, fake.stride())], number(fake.storage_offset())


def _overlaps(target: Tensor, source: Tensor, graph: CapturedGraph) -> bool:
    """Whether two dense tensors of one storage overlap without being the same one."""
    spans = []
    for fake in (target, source):
        sizes, strides, offset = _geometry(fake, graph)
        expected, dense = 1, True
        for stride, size in sorted(zip(strides, sizes, strict=True)):
            if size != 1:
                dense, expected = dense and stride == expected, expected * size
        if not dense or 0 in sizes:
            return False  # torch does not look
        begin = offset * fake.element_size()
        spans.append((begin, begin + expected * fake.element_size(), strides))
    (begin, end, strides), (other, other_end, other_strides) = spans
    if (begin, end) == (other, other_end):
        return strides != other_strides
    return begin < other_end and other < end
