"""Views that forward returns, taken after the last piece.

Before    piece: v = linear(x); return v.t(), v[:, 2:6]
After     piece: v = linear(x); return v          forward: return v.t(), v[:, 2:6]

When      a result of forward is a view of a tensor that the graph computes. Inductor may store such a view densely and apart from
          other views of the same tensor; eager code's strides and shared memory hold for views that torch itself takes.
Cost      none: Inductor takes a view by one call, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.aliasing import AliasAnalysisError, analyze_aliasing
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import is_size, value


def separate_result_views(graph: CapturedGraph) -> None:
    """Copy the views among the graph's results after all other nodes, and name them in `graph.result_views`."""
    try:
        with graph.without_guards():
            views = analyze_aliasing(graph.graph, inputs_may_alias=False).views
    except AliasAnalysisError:  # a nested graph: its results stay where they are
        return
    output = graph.graph.output_node()
    copies: dict[fx.Node, fx.Node] = {}
    for result in output.all_input_nodes:
        if result in views and _base(result, views).op != "placeholder":
            _copy(result, views, copies, output)
    if not copies:
        return
    output.args = fx.map_arg(output.args, lambda node: copies.get(node, node))
    for node in reversed(copies):
        if not node.users:
            graph.graph.erase_node(node)
    graph.module.recompile()
    graph.result_views = frozenset(copies.values())


def _base(node: fx.Node, views: frozenset[fx.Node]) -> fx.Node:
    """The tensor that a node is a view of, through any number of views."""
    while node in views:
        source = next(each for each in node.all_input_nodes if not isinstance(value(each), torch.SymInt))
        if not isinstance(value(source), Tensor) and source not in views:
            break  # a result of an operation with several ones
        node = source
    return node


def _copy(node: fx.Node, views: frozenset[fx.Node], copies: dict[fx.Node, fx.Node], output: fx.Node) -> None:
    """Copy a view before the output, with the views and the sizes of tensors that it needs."""
    if node in copies or node.op == "placeholder" or is_size(node):
        return
    is_view = node in views and (_base(node, views) is not node)
    if isinstance(value(node), Tensor) and not is_view:
        return
    for source in node.all_input_nodes:
        _copy(source, views, copies, output)
    with output.graph.inserting_before(output):
        copies[node] = output.graph.node_copy(node, lambda source: copies.get(source, source))
