"""Graph rewriting: insert operations traced from a plain function, move readers, erase nodes, compare fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchweave.compiler.codegen.lower import trace
from torchweave.compiler.ir.graph import CapturedGraph, FakeGraph, same_geometry
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.ir.symbols import value

VIEWS = frozenset({"unsqueeze", "squeeze", "reshape", "view", "flatten", "contiguous"})
"""Methods of tensors that keep the order of elements."""


def insert(graph: FakeGraph, before: fx.Node, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Insert the operations of `function(*arguments)` before a node; return the function's result as nodes.

    Args:
        arguments: nodes of the graph, plain values, and nests of both. The function is called with fake tensors and symbolic
            sizes instead of nodes.

    Raises:
        ValueError: the function creates a tensor independent of its arguments, writes to an argument, or specializes a size.
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
    """Reject writes, which functional graphs exclude, and specialized sizes, which would hold for the whole graph."""
    for node, before in zip(nodes, sizes, strict=True):
        if before != _sizes(node):
            raise ValueError(
                f"a replacement is valid only for {node.name} of sizes {_sizes(node)}, not for all sizes {before}"
            )
    arguments = dict(zip((node for node in traced.nodes if node.op == "placeholder"), nodes, strict=True))
    for node in traced.nodes:
        for target in mutated_args(node):
            written = arguments[target].name if target in arguments else target.name
            raise ValueError(f"a replacement writes to {written}; compute a new tensor instead")


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
                    "a replacement creates a constant tensor; pass it in, or compute it from the arguments"
                )
            else:
                copies[node] = graph.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["stack_trace"] = before.meta.get("stack_trace")
    return list(flat)


def replace_call(graph: CapturedGraph, node: fx.Node, op: Any, arguments: tuple[Any, ...]) -> str | None:
    """Replace a call by one of `op`; return the reason when the op's result differs, and the call stays."""
    result = graph.fake_ops.run(op, fx.map_arg(arguments, value), {})  # type: ignore[arg-type]
    if not same_geometry(result, value(node)):
        return "its result has another layout or dtype than the op's"
    with graph.graph.inserting_before(node):
        new = graph.graph.call_function(op, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
    return None


def move_readers_after(covered: Sequence[fx.Node], outputs: Sequence[fx.Node], read: Sequence[fx.Node]) -> str | None:
    """Move readers of `outputs` after the last covered node, where the replacement is inserted.

    Returns:
        The reason why that is impossible: the replacement would read a value computed from its own result.
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
            return f"{inner[0].name}, an input, is computed from its own result"
    after = last
    for node in late:
        after.append(node)
        after = node
    return None if not set(read) & late.keys() else "an input is computed from its own result"


def same_tensor_metadata(one: Any, other: Any) -> bool:
    """Whether two fake tensors agree in shape, dtype, device, and the strides of every dimension of size other than 1."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    if (one.dtype, one.device, one.dim()) != (other.dtype, other.device, other.dim()):
        return False
    return all(
        str(size) == str(other_size) and (str(size) == "1" or str(step) == str(other_step))
        for size, other_size, step, other_step in zip(one.shape, other.shape, one.stride(), other.stride(), strict=True)
    )


def describe_tensor(fake: Any) -> str:
    """Dtype, shape and strides of a fake tensor, for messages."""
    if not isinstance(fake, Tensor):
        return repr(fake)
    return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)} with strides {list(fake.stride())}"


def erase(graph: FakeGraph, nodes: Sequence[fx.Node]) -> int:
    """Erase the nodes without readers, last first; return their number."""
    num_erased = 0
    for node in reversed(nodes):
        if not node.users:
            graph.graph.erase_node(node)
            num_erased += 1
    return num_erased


def single_reader(out: fx.Node, writer: fx.Node) -> fx.Node | None:
    """The only reader of `out` besides its writer, past order-preserving views; None if several calls read it."""
    node, users = out, [user for user in out.users if user is not writer]
    while len(users) == 1 and users[0].op == "call_method" and users[0].target in VIEWS and users[0].args[0] is node:
        node = users[0]
        users = list(node.users)
    return users[0] if len(users) == 1 else None
