"""Keep what was read from an input before Inductor's graph writes to it, and results apart from inputs.

Before                                              After
    copy_(a, b); copy_(b, a)                            old = opaque_clone(a); copy_(a, b); copy_(b, old)
    y = index_put(x, [i], v); copy_(x, zeros)           copy = clone(x); y = index_put(copy, [i], v); copy_(x, zeros)
    return x                                            return clone(x)

When      Inductor's simplifications removed a copy (`clone`, `+ 0`, a cast, a cat of one tensor) as if inputs were never written:
          the graph then reads an input at or after its write, writes a scatter or a custom op's result into an input that gets
          another value, or returns an input, or one tensor twice, where forward returns a tensor of its own.
          Whatever removed the copy, the graph that remains shows it: `NoteResults` reads which results are inputs or share
          memory before any simplification, `KeepInputs` compares after the last one.
Numerics  exact.
Cost      the copy that forward asks for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torchweave import version
from torchweave.compiler.eager_semantics.copy_before_write import VIEW_WRITES, base_of, is_view
from torchweave.compiler.eager_semantics.opaque_writes import OPAQUE_CLONE
from torchweave.compiler.ir.symbols import value

aten = torch.ops.aten

_BASES = "torchweave_bases"
"""Key in the output's metadata: for each result the name of the tensor that it is a view of."""
_AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


class NoteResults(CustomGraphPass):
    """Note of which tensor each result of a graph is a view; runs before Inductor's simplifications."""

    def __call__(self, graph: fx.Graph) -> None:
        output = graph.output_node()
        output.meta[_BASES] = [base_of(each).name for each in _results(output)]

    def uuid(self) -> Any:
        return version.package_source_hash()


class KeepInputs(CustomGraphPass):
    """See the module's text; runs after Inductor's simplifications and before it writes in place."""

    def __call__(self, graph: fx.Graph) -> None:
        writes = {
            node.args[0]: node
            for node in reversed(graph.nodes)
            if node.target is aten.copy_.default and _is_input(node.args[0])
        }
        if writes:
            _copy_overwritten_targets(graph, writes)
            _read_before_writes(graph)
        _separate_results(graph)

    def uuid(self) -> Any:
        """The key of the pass in Inductor's caches: all sources, since corrections beside it change Inductor's code as well."""
        return version.package_source_hash()


def _is_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _results(output: fx.Node) -> list[fx.Node]:
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    return [each for each in results if isinstance(each, fx.Node)]


def _clone(graph: fx.Graph, tensor: fx.Node, target: Any = aten.clone.default) -> fx.Node:
    copy = graph.call_function(target, (tensor,))
    copy.meta["val"] = torch.empty_like(value(tensor))
    return copy


def _copy_overwritten_targets(graph: fx.Graph, writes: dict[Any, fx.Node]) -> None:
    """Let a write whose result is not what an input gets write to a copy of the input."""
    for node in list(graph.nodes):
        for position, target in _write_targets(node):
            write = writes.get(base_of(target))
            if write is None or _leads_to(write.args[1], node, position):
                continue
            with graph.inserting_before(node):
                copy = _clone(graph, target)
            if node.target is _AUTO_FUNCTIONALIZED:
                bases = list(node.kwargs["_all_bases"])  # type: ignore[arg-type]
                bases[position] = copy
                node.kwargs = {**node.kwargs, "_all_bases": bases}
            else:
                node.update_arg(position, copy)


def _write_targets(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The arguments that Inductor may write a functional operation's result into, with their positions."""
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    if node.target is _AUTO_FUNCTIONALIZED:
        for position, each in enumerate(node.kwargs["_all_bases"]):  # type: ignore[arg-type, var-annotated]
            if isinstance(each, fx.Node):
                yield position, each
    elif node.target in VIEW_WRITES:
        yield 0, node.args[0]  # type: ignore[misc]
    elif node.target in inplaceable_ops:
        for position in inplaceable_ops[node.target].mutated_args:  # type: ignore[index]
            if isinstance(node.args[position], fx.Node):
                yield position, node.args[position]  # type: ignore[misc]


def _leads_to(result: Any, write: fx.Node, position: int) -> bool:
    """Whether a value is what a write makes of its argument at `position`, or what later writes make of that."""
    while isinstance(result, fx.Node):
        if result.target is operator.getitem and (of := result.args[0]).target is _AUTO_FUNCTIONALIZED:  # type: ignore[union-attr]
            place: Any = result.args[1]
            index: int = place - max(1, len(of.args[0]._schema.returns))  # type: ignore[union-attr]
            if of is write or index < 0:  # below 0: a result of the op itself
                return of is write and index == position
            result = of.kwargs["_all_bases"][index]  # type: ignore[index, union-attr]
        elif result is write:
            return True
        elif is_view(result):
            result = result.args[0]
        elif result.target in VIEW_WRITES and _leads_to(result.args[1], write, position):
            return True  # the part of the input that was written, put back
        else:
            targets = [target for _, target in _write_targets(result)]
            result = targets[0] if len(targets) == 1 else None
    return False


def _read_before_writes(graph: fx.Graph) -> None:
    """Copy an input before the first write, where a later node than its own write reads it or a view of it."""
    first, written = None, set()
    place = {node: position for position, node in enumerate(graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        target = node.args[0] if node.target is aten.copy_.default else None
        if first is not None:
            for read in node.all_input_nodes:
                if read is target or base_of(read) not in written:
                    continue
                if read not in copies:
                    with graph.inserting_before(first) if place[read] < place[first] else graph.inserting_after(read):
                        copies[read] = _clone(graph, read, OPAQUE_CLONE)
                node.args = fx.map_arg(node.args, lambda each, read=read: copies[read] if each is read else each)
        if target is not None:
            first = first or node
            written.add(target)


def _separate_results(graph: fx.Graph) -> None:
    """Copy results that became inputs, views of them, or one tensor with another result."""
    output = graph.output_node()
    noted = output.meta.get(_BASES)
    results = _results(output)
    if noted is None or len(noted) != len(results):
        return
    known: dict[fx.Node, str] = {}  # the base of a result now, and before
    copied: dict[int, fx.Node] = {}
    for index, (result, before) in enumerate(zip(results, noted, strict=True)):
        now = base_of(result)
        if not isinstance(value(result), Tensor):
            continue
        if (_is_input(now) and before != now.name) or known.setdefault(now, before) != before:
            with graph.inserting_before(output):
                copied[index] = _clone(graph, result)
    if copied:
        positions = iter(range(len(results)))
        args = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args

        def replaced(each: Any) -> Any:
            return copied.get(next(positions), each) if isinstance(each, fx.Node) else each

        output.args = (tuple(map(replaced, args)),)
