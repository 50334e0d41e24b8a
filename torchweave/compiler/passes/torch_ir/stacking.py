"""Merge calls that read one tensor and differ only in constants stackable by rows into one call over the stacked constants.

Shared by `merge_linears` and `merge_fp8_linears`: barriers between the calls, the check that every reader takes a strided view, the
rewrite, and moving the module's parameters into the stacked constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.graph import CapturedGraph, update_fake_values
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import boundary_op
from torchweave.compiler.passes.base import NearMiss

StackedConstants = dict[tuple[fx.Node, ...], tuple[fx.Node, ...]]
"""Weights of a group's calls -> its stacked constants; two groups over the same weights share one stack."""

_STRIDE_READERS: tuple[tuple[str, Any], ...] = (
    ("call_method", "as_strided"),
    ("call_method", "as_strided_"),
    ("call_function", torch.as_strided),
    ("call_function", torch.as_strided_),
    ("call_function", torch.ops.aten.as_strided.default),
)
"""Calls whose result depends on the memory layout of their argument, and which raise no error when that changes."""


_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}


@dataclass(frozen=True)
class StackableCall:
    """One call of a group.

    Attributes:
        node: the call, with outputs `[..., N]`.
        x: the input that all calls of the group read.
        constants: stacked along the first dimension; the weight `[N, K]` first.
        arguments: of the call, in order, `x` and `constants` among them.
        padding: rows of zeros that are stacked after its constants, so that the next call's outputs stay aligned.
    """

    node: fx.Node
    x: fx.Node
    constants: tuple[fx.Node, ...]
    arguments: tuple[Any, ...]
    padding: int = 0

    def merged_arguments(self, stacked: Sequence[Any], read: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
        """The arguments with other constants (nodes or fake values); `read` maps the other nodes."""
        new = dict(zip(self.constants, stacked, strict=True))
        return fx.map_arg(self.arguments, lambda node: new[node] if node in new else read(node))  # type: ignore[return-value]


def mergeable_groups(
    graph: CapturedGraph, group: Sequence[StackableCall], near_misses: list[NearMiss]
) -> Iterator[list[StackableCall]]:
    """Split a group, in graph order, at boundary ops and at writes to its input."""
    adjacent = list(group[:1])
    for last, item in pairwise(group):
        why = find_barrier(graph, last.node, item.node, storage_id(item.x))
        if why is not None:
            near_misses.append(NearMiss(item.node.name, f"reads {item.x.name} like {last.node.name}, but {why}"))
            if len(adjacent) > 1:
                yield adjacent
            adjacent = []
        adjacent.append(item)
    if len(adjacent) > 1:
        yield adjacent


def find_barrier(graph: CapturedGraph, node: fx.Node, last: fx.Node, read: int | None) -> str | None:
    """Why a call at `last` cannot move up to `node`, or None. `read`: the storage that the call reads."""
    while node is not last:
        node = node.next
        if node.op == "call_function" and boundary_op(node.target, graph.boundary_ops) is not None:
            return f"the boundary op {node.name} lies between them"
        if any(storage_id(argument) == read for argument in mutated_args(node)):
            return f"{node.name} writes to it between them"
    return None


def merge_groups(
    graph: CapturedGraph, groups: Iterable[list[StackableCall]], near_misses: list[NearMiss]
) -> tuple[int, int]:
    """Merge every group; return the number of merged groups and of calls in them."""
    stacked: StackedConstants = {}
    matches = rewritten = 0
    for group in groups:
        why = _merge_calls(graph, group, stacked)
        if why is not None:
            near_misses.append(NearMiss(", ".join(item.node.name for item in group), why))
            continue
        matches, rewritten = matches + 1, rewritten + len(group)
    graph.drop_unused_constants()
    return matches, rewritten


def _merge_calls(graph: CapturedGraph, group: Sequence[StackableCall], stacked: StackedConstants) -> str | None:
    """Merge a group of at least two calls into one; return the reason when it is left unchanged."""
    key = tuple(item.constants[0] for item in group)
    parts = {weight for known in stacked for weight in known}
    if key not in stacked and (len(set(key)) < len(key) or parts & set(key)):
        return "a weight is already part of another merged weight"
    try:
        faked = _fake_outputs(graph, group)
    except Exception as error:  # readers that cannot take a strided view raise errors of any type
        return f"a reader needs a contiguous result ({str(error).splitlines()[0]})"
    made = {storage_id(item.node) for item in group}
    for node in (node for op, target in _STRIDE_READERS for node in graph.graph.find_nodes(op=op, target=target)):
        if any(storage_id(source) in made for source in node.all_input_nodes):
            return f"{node.name} reads a result by strides of its own"
    _rewrite(graph, group, stacked, faked)
    return None


_FakeOutputs = tuple[Any, tuple[Any, ...], list[Any], dict[fx.Node, Any]]


def _fake_outputs(graph: CapturedGraph, group: Sequence[StackableCall]) -> _FakeOutputs:
    """Fake values of the merged call, its parts, these or their copies, and every downstream node whose geometry changes.

    Raises the error of a reader that cannot take a strided view.
    """
    target: Any = group[0].node.target
    columns = zip(*(item.constants for item in group), strict=True)
    constants = [
        graph.fake_ops.run(torch.cat, (_padded([value(node) for node in column], group),), {}) for column in columns
    ]
    whole = graph.fake_ops.run(target, group[0].merged_arguments(constants, value), {})
    parts = graph.fake_ops.run(torch.split, (whole, _split_sizes(group)), {"dim": -1})
    results = [
        graph.fake_ops.run(torch.clone, (part,), _CONTIGUOUS) if _is_returned(graph, item.node) else part
        for item, part in zip(group, (parts[index] for index in _part_indices(group)), strict=True)
    ]
    new = {item.node: result for item, result in zip(group, results, strict=True)}
    changed = update_fake_values(graph, {node: new[node] for node in sorted(new)}, commit=False)
    return whole, parts, results, changed


def _is_returned(graph: CapturedGraph, node: fx.Node) -> bool:
    """Whether forward returns a node's result or a view of it, which its caller may view as eager code could."""
    output = graph.graph.output_node()
    return storage_id(node) in map(storage_id, output.all_input_nodes)


def _rewrite(
    graph: CapturedGraph, group: Sequence[StackableCall], stacked: StackedConstants, faked: _FakeOutputs
) -> None:
    key = tuple(item.constants[0] for item in group)
    if key not in stacked:
        columns = zip(*(item.constants for item in group), strict=True)
        stacked[key] = tuple(_merge_constants(graph, column, group) for column in columns)
    whole, parts, results, changed = faked
    for node, new in changed.items():
        node.meta["example_value"] = new
    nodes, first = graph.graph, min(item.node for item in group)
    target: Any = first.target
    with nodes.inserting_before(first):
        one = nodes.call_function(target, group[0].merged_arguments(stacked[key], lambda node: node))
        pieces = nodes.call_function(torch.split, (one, _split_sizes(group)), {"dim": -1})
        items = [nodes.call_function(operator.getitem, (pieces, index)) for index in _part_indices(group)]
        for index, (number, result) in enumerate(zip(_part_indices(group), results, strict=True)):
            part = parts[number]
            items[index].meta["example_value"] = part
            if result is not part:
                items[index] = nodes.call_function(torch.clone, (items[index],), _CONTIGUOUS)
    one.meta.update(example_value=whole, stack_trace=first.meta.get("stack_trace"))
    pieces.meta["example_value"] = parts
    for item, new, result in zip(group, items, results, strict=True):
        new.meta["example_value"] = result
        item.node.replace_all_uses_with(new)
        nodes.erase_node(item.node)


def _split_sizes(group: Sequence[StackableCall]) -> list[int]:
    """Outputs of each call, and its padding after them where it has some."""
    sizes = ((value(item.constants[0]).shape[0], item.padding) for item in group)
    return [size for rows, padding in sizes for size in ((rows, padding) if padding else (rows,))]


def _part_indices(group: Sequence[StackableCall]) -> list[int]:
    """The index of each call's outputs in the parts of `_split_sizes`."""
    return [index + sum(item.padding > 0 for item in group[:index]) for index in range(len(group))]


def _padded(tensors: Sequence[Tensor], group: Sequence[StackableCall]) -> list[Tensor]:
    """One constant of each call, and the zeros after it."""
    padded: list[Tensor] = []
    for tensor, item in zip(tensors, group, strict=True):
        padded.append(tensor)
        if item.padding:
            padded.append(tensor.new_zeros(item.padding, *tensor.shape[1:]))
    return padded


def _merge_constants(graph: CapturedGraph, nodes: Sequence[fx.Node], group: Sequence[StackableCall]) -> fx.Node:
    """Stack constants into one; the originals become views of it."""
    tensors = [tensor for node in nodes if (tensor := graph.constant(node)) is not None]
    assert len(tensors) == len(nodes), "only constants are stacked"
    whole = _concatenate(_padded(tensors, group))
    start = 0
    for node, tensor, item in zip(nodes, tensors, group, strict=True):
        end = start + tensor.shape[0]
        graph.rebind_constant(node, whole[start:end])
        start = end + item.padding
    return graph.add_constant(f"merged_{nodes[0].name}", whole)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, of FP8 tensors as bytes."""
    with torch.no_grad():
        if tensors[0].dtype.is_floating_point and tensors[0].dtype.itemsize == 1:
            return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
        return torch.cat(list(tensors))
