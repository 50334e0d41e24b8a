"""Putting new operations into a graph: traced from a plain function, with fake values, behind all that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchweave.compiler.codegen.lower import trace
from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.ir.symbols import value


def insert(graph: FakeGraph, before: fx.Node, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Put the operations of `function(*arguments)` in front of a node; returns what the function returns, as nodes.

    Args:
        arguments: nodes of the graph, plain values, and nests of both. The function sees tensors and symbolic sizes in the
            place of nodes.

    Raises:
        ValueError: the function makes a tensor that does not come from its arguments, writes to one of them, or holds for
            some sizes alone.
    """
    leaves, spec = pytree.tree_flatten(list(arguments))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    returned: list[Any] = []

    def on_values(*values: Any) -> list[Any]:
        rest = iter(values)
        filled = [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        flat, shape = pytree.tree_flatten(function(*pytree.tree_unflatten(filled, spec)))
        returned.append(shape)
        return flat

    sizes = [_sizes(node) for node in nodes]
    traced = trace(on_values, [value(node) for node in nodes])
    _check_replacement(traced.graph, nodes, sizes)
    flat = _copy(graph, before, traced.graph, nodes)
    return pytree.tree_unflatten(flat, returned[-1])


def _check_replacement(traced: fx.Graph, nodes: list[fx.Node], sizes: list[str]) -> None:
    """Nobody looks for writes in a functional graph, and a size that tracing fixed is fixed in all of it."""
    for node, known in zip(nodes, sizes, strict=True):
        if known != _sizes(node):
            raise ValueError(
                f"a replacement is right for {node.name} of sizes {_sizes(node)}, not of all sizes {known}"
            )
    arguments = dict(zip((node for node in traced.nodes if node.op == "placeholder"), nodes, strict=True))
    for node in traced.nodes:
        for target in mutated_args(node):
            what = arguments[target].name if target in arguments else target.name
            raise ValueError(f"a replacement writes to {what}; compute a new tensor instead")


def _sizes(node: fx.Node) -> str:
    fake = value(node)
    return str(list(fake.shape)) if isinstance(fake, Tensor) else str(fake)


def _copy(graph: FakeGraph, before: fx.Node, traced: fx.Graph, nodes: list[fx.Node]) -> list[Any]:
    copies: dict[fx.Node, Any] = {}
    given = iter(nodes)
    flat: Any = []
    with graph.graph.inserting_before(before):
        for node in traced.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "output":
                flat = fx.map_arg(node.args[0], copies.__getitem__)
            elif node.op == "get_attr":
                raise ValueError(
                    "a replacement makes a tensor of its own; hand it in, or compute it from the arguments"
                )
            else:
                copies[node] = graph.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["stack_trace"] = before.meta.get("stack_trace")
    return list(flat)


def move_readers_after(covered: Sequence[fx.Node], outputs: Sequence[fx.Node], read: Sequence[fx.Node]) -> str | None:
    """Move readers of `outputs` behind the last covered node, so that something new can stand there.

    Returns:
        Why that cannot be: what the new operations read is computed from what they return.
    """
    last, inside = covered[-1], set(covered)
    late: dict[fx.Node, None] = {}
    node = covered[0]
    while node is not last:
        node = node.next
        if node not in inside and any(source in late or source in outputs for source in node.all_input_nodes):
            late[node] = None
    for node in covered:
        inner = [source for source in node.all_input_nodes if source in late]
        if inner:
            return f"{inner[0].name}, which it reads, is computed from its own result"
    after = last
    for node in late:
        after.append(node)
        after = node
    return None if not set(read) & late.keys() else "it reads what is computed from its own result"


def same_tensor_metadata(one: Any, other: Any) -> bool:
    """Whether two fake values agree in shape, dtype, device, and the strides of every dimension that has more than one row."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    if (one.dtype, one.device, one.dim()) != (other.dtype, other.device, other.dim()):
        return False
    return all(
        str(size) == str(wanted) and (str(size) == "1" or str(step) == str(wanted_step))
        for size, wanted, step, wanted_step in zip(one.shape, other.shape, one.stride(), other.stride(), strict=True)
    )


def describe_tensor(fake: Any) -> str:
    """A fake value as a reason names it: dtype, shape, strides."""
    if not isinstance(fake, Tensor):
        return repr(fake)
    return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)} with strides {list(fake.stride())}"


def erase(graph: FakeGraph, nodes: Sequence[fx.Node]) -> int:
    """Take nodes out that nobody reads any more, last first; returns how many."""
    num_erased = 0
    for node in reversed(nodes):
        if not node.users:
            graph.graph.erase_node(node)
            num_erased += 1
    return num_erased
