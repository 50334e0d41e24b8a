"""Restore the in-place form of custom ops that a functional graph copies for.

Before                                                  After
    out = empty(...)                                        out = empty(...)
    f = auto_functionalized_v2(op, x=x,                     op(x, out)
            _out_base_index=0, _all_bases=[out])            ... reads out
    ... reads f[1], a copy of out that op wrote to

When      for every tensor that the op writes to: no later operation and no output reads it or a view of it by its old name; it
          is not an input of the piece, unless the piece copies this result back to that input alone; no other argument of
          the op shares its memory. The op's schema gives the mutated arguments; views are rebuilt from the size, stride and
          offset that the functional form records.
Numerics  exact.
Pays      in FX builds: one copy less for each written tensor. Inductor does the same in its builds.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize as functional
from torch.utils._pytree import tree_leaves

from torchweave.compiler.ir.aliasing import AliasAnalysisError, AliasInfo, analyze_aliasing, computes_sizes
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import normalize_call
from torchweave.compiler.passes.base import Build, GraphPass, NearMiss, PassResult, Stage

FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True)
class MutatedTensor:
    """A tensor that a functional call copies for its op to write to.

    Attributes:
        base: the tensor.
        results: the `getitem` nodes of the copy after the call.
    """

    base: fx.Node
    results: tuple[fx.Node, ...]


@dataclass(frozen=True)
class FunctionalCall:
    """The parts of a functional call of a mutating op.

    Attributes:
        arguments: by schema names; mutated arguments as `ViewOfBase`.
        outputs: for each output of the op, its `getitem` nodes.
    """

    node: fx.Node
    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    written: tuple[MutatedTensor, ...]
    outputs: tuple[tuple[fx.Node, ...], ...]


@dataclass(frozen=True)
class ViewOfBase:
    """A mutated argument as a view of its base: an op and its arguments after the base; without op, the base itself."""

    base: fx.Node
    op: Any = None
    arguments: tuple[Any, ...] = ()


class NotReinplaceable(Exception):
    """A functional call must stay functional; the message gives the reason."""


class Reinplace(GraphPass):
    """See the module's text."""

    name = "reinplace"
    stage: Stage = "aten"
    builds: tuple[Build, ...] = ("fx",)

    def run(self, graph: Any) -> PassResult:
        matches, near_misses = 0, []
        # Last call first: each check then sees the later calls in their final form.
        for node in reversed(list(graph.graph.nodes)):
            if node.op != "call_function" or node.target is not FUNCTIONALIZED:
                continue
            try:
                call = _decompose(node)
                memory = analyze_aliasing(graph.graph, inputs_may_alias=False)
                for each in call.written:
                    why = find_observer(call, each, memory)
                    if why is not None:
                        raise NotReinplaceable(why)
            except (NotReinplaceable, AliasAnalysisError) as refusal:
                near_misses.append(NearMiss(node.name, str(refusal)))
                continue
            _rewrite(graph.graph, call)
            matches += 1
        return PassResult(matches, matches, tuple(near_misses))


def find_observer(call: FunctionalCall, written: MutatedTensor, memory: AliasInfo) -> str | None:
    """Why an in-place write to `written` would be observable, or None."""
    base = written.base
    groups = memory.holds[base]
    others = [leaf for leaf in tree_leaves(call.arguments) if isinstance(leaf, fx.Node)]
    others += [each.base for each in call.written if each is not written]
    if alias := next((each for each in others if memory.holds[each] & groups), None):
        return f"{alias.name}, another argument of the op, shares memory with {base.name}"
    copy_back = _find_copy_back(base, written)
    if base.op == "placeholder" and copy_back is None:
        return f"{base.name} is an input, and the result is not written back to it"
    inputs = [node for node in memory.access if node.op in ("placeholder", "get_attr") and memory.holds[node] & groups]
    if base not in inputs and inputs:
        return f"{base.name} shares memory with the input {inputs[0].name}"
    node = call.node
    while (node := node.next).op != "root":
        reads = [argument for argument in node.all_input_nodes if memory.holds[argument] & groups]
        if not reads or node is copy_back or computes_sizes(node):
            continue
        if node.op == "output":
            return f"the piece returns {reads[0].name}, which shares memory with {base.name}"
        return f"{node.name} later reads {reads[0].name}, which shares memory with {base.name}"
    return None


def _find_copy_back(base: fx.Node, written: MutatedTensor) -> fx.Node | None:
    """The `copy_` at the end of a functional graph that writes the result of the call back to an input, or None."""
    for node in base.users if base.op == "placeholder" else ():
        if node.target is torch.ops.aten.copy_.default and node.args[0] is base and node.args[1] in written.results:
            return None if node.users else node
    return None


def _decompose(node: fx.Node) -> FunctionalCall:
    """Parts of a functional call; raises `NotReinplaceable` for unsupported forms."""
    op: Any = node.args[0]
    given: dict[str, Any] = dict(node.kwargs)
    if not isinstance(op, torch._ops.OpOverload):
        raise NotReinplaceable(f"{op} is not an op with a schema")
    names, types = functional.get_mutable_args(op)
    offset = max(1, len(op._schema.returns))
    if "_all_bases" not in given:
        raise NotReinplaceable("its functional form lists no base tensors")
    bases = list(given.pop("_all_bases"))
    infos = functional.read_view_information_from_args(names, types, given, bases)
    given |= {name: _views(infos[name], bases) for name in names}
    written = tuple(
        MutatedTensor(base, tuple(_items(node, offset + index))) for index, base in enumerate(bases) if base is not None
    )
    if len({each.base for each in written}) < len(written):
        raise NotReinplaceable("two of its mutated arguments are one tensor")
    outputs = tuple(tuple(_items(node, index)) for index in range(len(op._schema.returns)))
    read = {item for each in written for item in each.results} | {item for items in outputs for item in items}
    if not op._schema.returns:
        read |= set(_items(node, 0))
    if set(node.users) - read:
        raise NotReinplaceable("another node than getitem reads its results")
    return FunctionalCall(node, op, given, written, outputs)


def _items(node: fx.Node, index: int) -> Iterator[fx.Node]:
    yield from (user for user in node.users if user.target is operator.getitem and user.args[1] == index)


def _views(info: Any, bases: list[fx.Node]) -> Any:
    """The view information that torch recorded, as a `ViewOfBase`."""
    if info is None or isinstance(info, list):
        return info and [_views(each, bases) for each in info]
    base = bases[info.base_index]
    if isinstance(info, functional.AsStridedViewInfo):
        where = (list(info.size), list(info.stride), info.storage_offset)
        return ViewOfBase(base, torch.ops.aten.as_strided.default, where)
    if isinstance(info, functional.SliceViewInfo):
        return ViewOfBase(base, torch.ops.aten.slice.Tensor, (info.dim, info.start, info.end))
    if isinstance(info, (functional.AliasViewInfo, functional.NotView)):
        return ViewOfBase(base)
    raise NotReinplaceable(f"a view is recorded as {type(info).__name__}")


def _rewrite(graph: fx.Graph, call: FunctionalCall) -> None:
    node = call.node
    with graph.inserting_before(node):
        given = {name: _materialize(graph, each) for name, each in call.arguments.items()}
        new = graph.call_function(call.op, *normalize_call(call.op, (), given))
    results = [value(node)[index] for index in range(len(call.outputs))]
    new.meta = dict(node.meta)
    new.meta["val"] = None if not results else results[0] if len(results) == 1 else tuple(results)
    for index, readers in enumerate(call.outputs):
        for reader in readers:
            if len(call.outputs) == 1:
                reader.replace_all_uses_with(new)
            else:
                reader.args = (new, index)
    for each in call.written:
        copy_back = _find_copy_back(each.base, each)
        for result in each.results:
            result.replace_all_uses_with(each.base)
        if copy_back is not None:
            graph.erase_node(copy_back)
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)


def _materialize(graph: fx.Graph, thing: Any) -> Any:
    """Rebuild an argument of the op, with its view."""
    if isinstance(thing, list):
        return [_materialize(graph, each) for each in thing]
    if not isinstance(thing, ViewOfBase) or thing.op is None:
        return thing.base if isinstance(thing, ViewOfBase) else thing
    view = graph.call_function(thing.op, (thing.base, *thing.arguments))
    numbers = fx.map_arg(thing.arguments, value)
    base = value(thing.base)
    with base.fake_mode:
        view.meta["val"] = thing.op(base, *numbers)
    return view
