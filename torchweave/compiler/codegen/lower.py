"""Lower a piece of Torch IR to a functional graph of ATen and custom ops, the input of the ATen passes.

Tracing stops above autograd ("pre-dispatch"), so that composite ops (`linear`, `layer_norm`, `scaled_dot_product_attention`)
stay one node that is fast to call and easy to match. Only ops that may alias or mutate are decomposed. Sizes stay symbolic,
constants stay placeholders, and a custom op that mutates its arguments becomes `auto_functionalized_v2`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from torchweave.compiler.errors import VIEW_MUTATION_HINT, SizeError, source_location
from torchweave.compiler.ir.mutation import mutated_aliased_inputs, mutated_args, storage_id
from torchweave.compiler.ir.symbols import fixed_sizes, value
from torchweave.compiler.partition.split import Piece, digest

aten = torch.ops.aten

_CHECKS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg)


class LoweringError(Exception):
    """A piece has no equivalent functional graph; the message is the reason."""


def lower(piece: Piece, sizes: Mapping[str, int] | None = None) -> Piece:
    """The piece in ATen IR, with the same inputs, constants and outputs and fake values in `meta["val"]`.

    Args:
        sizes: values for symbols to fix; other symbols stay symbolic.

    Raises:
        LoweringError: the piece writes to an aliased input, or tracing fails.
        SizeError: tracing fixed a dynamic size.
    """
    return cached_lowering(piece, sizes)()


def cached_lowering(piece: Piece, sizes: Mapping[str, int] | None = None) -> Callable[[], Piece]:
    """Trace a piece once; returns a function that gives a new lowered piece at each call, see `lower`."""
    _reject_aliased_mutations(piece)
    examples = [_fixed(each, sizes) for each in piece.examples()] if sizes else piece.examples()
    interpreter = _Interpreter(piece)
    try:
        traced = trace(interpreter.run, examples)
    except Exception as error:  # tracing raises what an op's fake kernel raises
        raise LoweringError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if interpreter.fixed is not None:
        raise interpreter.fixed
    names = [str(node.target) for node in piece.module.graph.nodes if node.op == "placeholder"]
    return lambda: replace(piece, module=_renamed(traced, names, examples))


class _Interpreter(fx.Interpreter):
    """Runs a piece and records the first operation that fixes a dynamic size in `fixed`."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.module)
        self._shape_env = piece.fake_mode.shape_env
        self._known = fixed_sizes(self._shape_env)
        self.fixed: SizeError | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        new = {symbol: size for symbol, size in fixed_sizes(self._shape_env).items() if symbol not in self._known}
        if new and self.fixed is None:
            cause = f"{n.name} is valid only for a size of {min(new.values())}; {VIEW_MUTATION_HINT}"
            self.fixed = SizeError(cause, source_location(n))
        return result


def trace(function: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """`function(*examples)` as a simplified functional ATen graph.

    Args:
        function: takes one argument for each example and returns a tree of tensors.
        examples: fake tensors and symbolic sizes of one fake mode.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def functional(*arguments: Any) -> Any:
        # `export=True` keeps composite ops whole; there is no export.
        rest = iter(arguments)
        filled = [each if _is_number(each) else next(rest) for each in examples]
        return _functionalized(function, filled, FunctionalTensorMode(pre_dispatch=True, export=True))

    varying = [each for each in examples if not _is_number(each)]  # tracing would turn numbers into symbols
    with torch.no_grad(), preserve_node_meta(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="At pre-dispatch tracing, we assume")
        traced = make_fx(functional, tracing_mode="symbolic", pre_dispatch=True, _allow_fake_constant=True)(*varying)
    _add_numbers(traced.graph, examples)
    _tidy(traced)
    return traced


def _is_number(thing: Any) -> bool:
    return isinstance(thing, (bool, int, float))


def _add_numbers(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Add an unused placeholder for each argument that is a number."""
    node = next(iter(graph.nodes))
    for position, each in enumerate(examples):
        if _is_number(each):
            with graph.inserting_before(node):
                graph.placeholder(f"number_{position}").meta["val"] = each
        else:
            node = node.next


def as_piece(traced: fx.GraphModule) -> Piece:
    """A traced graph as a piece that belongs to no captured graph."""
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    names = [f"input_{position}" for position in range(len(placeholders))]
    module = _renamed(traced, names, [value(node) for node in placeholders])
    nodes = list(module.graph.nodes)
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    return Piece(0, module, inputs, (), tuple(nodes[-1].all_input_nodes), digest(module, len(inputs)))


def _functionalized(function: Callable[..., Any], arguments: Sequence[Any], mode: Any) -> Any:
    """Call `function` functionalized; writes to arguments become copies at the end."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    private: Any = torch
    without_functionalize = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    )

    def plain(tensor: Any) -> Any:
        private._sync(tensor)
        return private._from_functional_tensor(tensor.elem)

    with without_functionalize, mode:
        wrapped = [FunctionalTensor.to_functional(item) if isinstance(item, Tensor) else item for item in arguments]
        result = tree_map_only(FunctionalTensor, plain, function(*wrapped))
        mutated = [
            (argument, plain(functional))
            for argument, functional in zip(arguments, wrapped, strict=True)
            if isinstance(functional, FunctionalTensor) and private._functionalize_has_data_mutation(functional.elem)
        ]
    for argument, result_tensor in mutated:
        argument.copy_(result_tensor)
    return result


def _fixed(thing: Any, sizes: Mapping[str, int]) -> Any:
    """A fake value with some symbols replaced by numbers."""
    if isinstance(thing, torch.SymInt):
        symbols = thing.node.expr.free_symbols
        if not any(str(symbol) in sizes for symbol in symbols):
            return thing
        if any(str(symbol) not in sizes for symbol in symbols):
            raise LoweringError(f"the size {thing} contains symbols besides the fixed one")
        return int(thing.node.expr.xreplace({symbol: sympy.Integer(sizes[str(symbol)]) for symbol in symbols}))
    if not isinstance(thing, Tensor):
        return thing
    mode: Any = getattr(thing, "fake_mode", None)
    shape, strides = ([_fixed(size, sizes) for size in each] for each in (thing.shape, thing.stride()))
    offset = _fixed(thing.storage_offset(), sizes)
    with mode:
        plain = torch.empty_strided(shape, strides, dtype=thing.dtype, device=thing.device)
        if isinstance(offset, int) and offset == 0:
            return plain
        extent = offset + plain.untyped_storage().nbytes() // thing.element_size()
        return torch.empty(extent, dtype=thing.dtype, device=thing.device).as_strided(shape, strides, offset)


def _reject_aliased_mutations(piece: Piece) -> None:
    """Raise if a mutated input is aliased: a functional graph writes to it only at the end, too late for other views."""
    nodes = list(piece.module.graph.nodes)
    for node in mutated_aliased_inputs(piece.module.graph).values():
        raise LoweringError(f"it writes to {node.name}, which shares its memory with another input")
    targets = {storage_id(argument) for node in nodes for argument in mutated_args(node)}
    returned = {storage_id(node) for node in nodes[-1].all_input_nodes}
    for node in nodes:
        storage = storage_id(node)
        if node.op == "placeholder" and storage is not None and storage in targets and storage in returned:
            raise LoweringError(f"it writes to {node.name} and returns a view of it")


def _tidy(traced: fx.GraphModule) -> None:
    """Merge nodes of equal sizes, correct fake values of copies, and erase runtime checks and dead code."""
    graph = traced.graph
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if isinstance(value(node), torch.SymInt):
            same = first.setdefault(str(value(node).node.expr), node)
            if same is not node:
                node.replace_all_uses_with(same)
        elif node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.copy.default:  # has memory of its own, and the offset of the view written to
            fake = value(node)
            with fake.fake_mode:
                node.meta["val"] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    graph.eliminate_dead_code()
    traced.recompile()


def _renamed(traced: fx.GraphModule, names: Sequence[str], values: Sequence[Any]) -> fx.GraphModule:
    """The traced graph with other placeholder names and a flat tuple of outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = zip(names, values, strict=True)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            name, fake = next(placeholders)
            copies[node] = graph.placeholder(name)
            copies[node].meta = {**node.meta, "val": fake}
        elif node.op == "output":
            flat = tree_leaves(node.args[0])
            output = graph.output(tuple(copies[item] if isinstance(item, fx.Node) else item for item in flat))
            output.meta["val"] = tuple(value(item) if isinstance(item, fx.Node) else item for item in flat)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            name = re.sub(r"_\d+$", "", node.name)  # number again from one; tracing counted erased nodes too
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, name)
            copies[node].meta = dict(node.meta)
    return fx.GraphModule(traced, graph, "Lowered")
