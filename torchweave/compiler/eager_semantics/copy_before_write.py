"""Keep Inductor from fusing a write with reads that it reorders: of the target, or of the result.

Before                                          After
    index_put(v, [i], v)                            copy = clone(v); index_put(copy, [i], v)
    slice_scatter(v, slice(v, 0, 0, -1), 0, 1)      copy = clone(v); slice_scatter(copy, slice(v, 0, 0, -1), 0, 1)
    mm(view(v), w); index_put(v, [mask], x)         mm(view(v), w); copy = clone(v); index_put(copy, [mask], x)

    index_put(v, [i], x); gather(x, 0, i)           opaque_index_put(v, [i], x); gather(x, 0, i)
    clamp_min(index_put(v, [i], x), 0)              clamp_min(opaque_index_put(v, [i], x), 0)

    copy_(input, flip(input))                       copy_(input, opaque_clone(flip(input)))

When      a write of Inductor's graph takes its values from a view of the tensor that it writes to, or its indices from anything
          computed from it. `v[i] = v.clone()` is such a write: Inductor removes the copy, then writes in place, so that one
          iteration reads what another wrote (torch 2.13; docs/how-to/diagnose.md has the program).
          Also where a mask selects what is written and another operation reads the target: Inductor replaces the target by the
          result wherever it is read through a view, in operations before the write as well.
          Also where a gather reads by the index of the write: fused with both, a later read of the result misses what other
          iterations wrote. And where an operation reads the result of an indexed write: Inductor writes in place, and its next
          write to the same memory is ordered before it. The write then becomes an op that Inductor only calls (`opaque_writes`).
          Also where an input gets values that are its own at other places: Inductor may read them while it overwrites them.
Numerics  exact.
Cost      a copy of v, which the forward asked for; an opaque write is not fused; a copy of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torchweave import version
from torchweave.compiler.eager_semantics.opaque_writes import OPAQUE, OPAQUE_CLONE
from torchweave.compiler.eager_semantics.slice_indices import resolve_slices
from torchweave.compiler.ir.symbols import value

aten = torch.ops.aten

_INDEXED_WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
_INDEXED_READS = (
    aten.gather.default,
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_select.default,
    aten.embedding.default,
)
_COPIES = (aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default)
VIEW_WRITES = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
)


class CopyBeforeWrite(CustomGraphPass):
    """See the module's text; runs on Inductor's graph after its own simplifications and before it writes in place."""

    def __call__(self, graph: fx.Graph) -> None:
        resolve_slices(graph)
        read = {source for node in graph.nodes if node.target in _INDEXED_READS for source in _index_sources(node)}
        for node in list(graph.nodes):
            if node.target in OPAQUE and (read & _index_sources(node) or _is_indexed_and_read(node)):
                node.target = OPAQUE[node.target]
            if node.target in (*_INDEXED_WRITES, *VIEW_WRITES) and (_reads_target(node) or _is_masked_and_shared(node)):
                target = node.args[0]
                with graph.inserting_before(node):
                    copy = graph.call_function(aten.clone.default, (target,))
                copy.meta["val"] = torch.empty_like(value(target))
                node.update_arg(0, copy)
            if node.target is aten.copy_.default and _moves_values(*node.args[:2]):
                with graph.inserting_before(node):
                    copy = graph.call_function(OPAQUE_CLONE, (node.args[1],))
                copy.meta["val"] = torch.empty_like(value(node.args[1]))
                node.update_arg(1, copy)

    def uuid(self) -> Any:
        """The key of the pass in Inductor's caches: all sources, since fake results of ops change Inductor's code as well."""
        return version.package_source_hash()


def _is_indexed_and_read(node: fx.Node) -> bool:
    """Whether an operation reads the result, or a view of it; a graph's results and inputs that are written back do not count.

    A mask is no index: such a write is elementwise, and as an op it would wait for the device.
    """
    if _is_masked(node):
        return False
    return _is_read(node, but=lambda user: user.target is aten.copy_.default)


def _is_masked_and_shared(node: fx.Node) -> bool:
    """Whether a mask selects what is written, and an operation beside it reads the target or a view of it."""
    if node.target not in _INDEXED_WRITES or not _is_masked(node):
        return False
    return _is_read(base_of(node.args[0]), but=lambda user: user is node)


def _is_masked(node: fx.Node) -> bool:
    """Whether one of the indices of a write is a mask."""
    return any(value(index).dtype is torch.bool for index in _index_sources(node))


def _is_read(tensor: fx.Node, but: Callable[[fx.Node], bool]) -> bool:
    """Whether an operation for which `but` is false reads a tensor, or a view of it; a graph's results do not count."""
    views = _reachable(tensor, lambda node: [user for user in node.users if is_view(user) and not but(user)])
    readers = (user for view in views for user in view.users)
    return any(not (user.op == "output" or but(user) or is_view(user)) for user in readers)


def _reachable(start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """`start`, and the nodes that `following` leads to from it, each once."""
    seen, queue = {start}, [start]
    while queue:
        node = queue.pop()
        yield node
        new = [each for each in following(node) if each not in seen]
        seen.update(new)
        queue += new


def _moves_values(target: Any, source: Any) -> bool:
    """Whether `source` is computed from `target`, an input of the graph, by more than elementwise operations."""
    if target.op != "placeholder" or not isinstance(source, fx.Node):
        return False
    tensors = _reachable(
        source, lambda node: [each for each in node.all_input_nodes if isinstance(value(each), torch.Tensor)]
    )
    return any(not _is_pointwise(node) and _is_computed_from(node, target) for node in tensors)


def _is_pointwise(node: fx.Node) -> bool:
    is_copy = node.op != "call_function" or node.target in _COPIES
    return is_copy or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _reads_target(node: fx.Node) -> bool:
    base = base_of(node.args[0])
    if node.target not in _INDEXED_WRITES:
        return base_of(node.args[1]) is base
    indices, values = node.args[1], node.args[2]
    return base_of(values) is base or any(_is_computed_from(index, base) for index in indices if index is not None)  # type: ignore[union-attr]


def base_of(node: Any) -> Any:
    """The tensor that a node is a view of, through any number of views; the node itself when it is none."""
    while isinstance(node, fx.Node) and is_view(node):
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    results = node.target._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in results)


def _index_sources(node: Any) -> set[Any]:
    """The indices of a gather or an indexed write, without views, copies and casts."""
    is_list = node.target in (*_INDEXED_WRITES, aten.index.Tensor, aten._unsafe_index.Tensor)
    index = node.args[1 if is_list or node.target is aten.embedding.default else 2]
    indices: list[Any] = [
        each for each in (index if isinstance(index, (list, tuple)) else [index]) if isinstance(each, fx.Node)
    ]
    found = set()
    for each in indices:
        while is_view(each) or each.target in _COPIES:
            each = each.args[0]
        found.add(each)
    return found


def _is_computed_from(node: fx.Node, base: Any) -> bool:
    return any(each is base for each in _reachable(node, lambda each: each.all_input_nodes))
