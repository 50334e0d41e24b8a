"""Run the shared expert of a mixture as one more of its routed experts.

Before                                                     After
    routed = torchweave.experts(x, index, w, up, down,         index = pad(index, (0, 1), value=E)
                                "silu")                        w = cat([w, sigmoid(linear(x, g))], -1)
    shared = silu(linear(x, Wg)) * linear(x, Wu)               y = torchweave.experts(x, index, w, [up; [Wg; Wu]], [down; Wd],
    shared = linear(shared, Wd)                                                       "silu", shared=True)
    y = routed + sigmoid(linear(x, g)) * shared

When      the shared expert has the width, the dtype and the activation of the routed ones (Qwen 3-Next, Qwen 3.5, DeepSeek V3, GLM
          4.5, Kimi K2), with a gate of one column or, with weight 1, without; no biases; all weights are parameters. Not over
          several ranks, where an all-reduce rounds each of the two outputs, and not with quantized experts.
Numerics  exact: the op rounds the sum of the routed experts, the shared expert's output and its weighted output as the model does.
Memory    none: the module's parameters become views of the stacked weights.
Pays      three launches a layer at decode with up to 16 tokens: two products and a sum. The column of the routing is written by
          `route`. Qwen 3.5 35B on an H100: about 0.12 of 3.19 ms a token. With more tokens the op makes the two products itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torchweave.ops.moe.experts  # noqa: F401  (defines torchweave::experts)
from torchweave.compiler.ir.graph import CapturedGraph, same_geometry
from torchweave.compiler.ir.mutation import storage_id
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import call_name, normalize_call
from torchweave.compiler.passes.base import GraphPass, Mismatch, PassResult, near_misses_by_reason
from torchweave.compiler.passes.torch_ir.stacking import find_barrier

_EXPERTS, _QUANTIZED, _ALL_REDUCE = "torchweave::experts", "torchweave::quantized_experts", "torchweave::all_reduce"
_ADD, _MULTIPLY = (operator.add, operator.iadd, torch.add), (operator.mul, operator.imul, torch.mul)
_SIGMOID = (torch.sigmoid, F.sigmoid, "sigmoid")
_ACTIVATIONS: dict[Any, str] = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
_VIEWS = ("reshape", "view", "contiguous", "flatten", "squeeze", "unsqueeze")
_op = torch.ops.torchweave.experts.default

StackedExperts = dict[tuple[fx.Node, ...], tuple[fx.Node, fx.Node]]
"""Five weights of a mixture -> its two stacked weights."""


@dataclass(frozen=True)
class _Mixture:
    """Routed experts, a shared expert, and the sum of their outputs.

    Attributes:
        routed: the call of the op.
        views: views of its result up to the sum.
        sum: the addition.
        gate, up, down: the shared expert's products.
        activation: the call between them.
        weight: the sigmoid that its output is multiplied by, or None.
        outputs: its output, that multiplied, and views of both up to the sum.
        reduced: an all-reduce lies between the experts and the sum.
    """

    routed: fx.Node
    views: tuple[fx.Node, ...]
    sum: fx.Node
    gate: fx.Node
    up: fx.Node
    down: fx.Node
    activation: fx.Node
    weight: fx.Node | None
    outputs: tuple[fx.Node, ...]
    reduced: bool


class SharedExpert(GraphPass):
    """See the module's text."""

    name = "shared_expert"

    def run(self, graph: CapturedGraph) -> PassResult:
        matches, before = 0, graph.num_calls()
        rejected: dict[str, list[str]] = {}
        stacked: StackedExperts = {}
        for node in list(graph.graph.nodes):
            mixture = _mixture(node) if _op_name(node) in (_EXPERTS, _QUANTIZED) else None
            if mixture is None:
                continue
            try:
                why = _reject_reason(graph, mixture, stacked)
            except Mismatch as mismatch:
                why = f"a product of the shared expert has {mismatch}"
            if why is None:
                _rewrite(graph, mixture, stacked)
                matches += 1
            else:
                rejected.setdefault(why, []).append(node.name)
        graph.drop_unused_constants()
        return PassResult(matches, before - graph.num_calls(), near_misses_by_reason(rejected))


# -- find --------------------------------------------------------------------------------------------------------------


def _calls(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these functions or methods."""
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


def _op_name(node: Any) -> str:
    """The name of the op that a node calls, or nothing."""
    return call_name(node) if isinstance(node, fx.Node) else ""


def _is_product(node: Any) -> bool:
    """Whether a node is a linear, of quantized weights or not."""
    name = _op_name(node)
    return _calls(node, F.linear) or (name.startswith("torchweave::") and "linear" in name)


def _is_view(node: Any) -> bool:
    """Whether a node is a view with the same rows."""
    return _calls(node, *_VIEWS) and value(node).shape[-1] == value(node.args[0]).shape[-1]


def _path(node: Any, *ops: str) -> list[Any]:
    """A node, and those whose rows it views, or passes through the ops, up to the first that does neither."""
    nodes = [node]
    while _is_view(nodes[-1]) or _op_name(nodes[-1]) in ops:
        nodes.append(nodes[-1].args[0])
    return nodes


def _source(node: Any, *ops: str) -> Any:
    """The last node of `_path`."""
    return _path(node, *ops)[-1]


def _operands(node: fx.Node) -> tuple[tuple[Any, Any], ...]:
    """The operands of an addition or a multiplication in both orders; none if it has further arguments."""
    if len(node.args) != 2 or node.kwargs:
        return ()
    return (node.args[0], node.args[1]), (node.args[1], node.args[0])


def _mixture(routed: fx.Node) -> _Mixture | None:
    """The mixture of routed experts to whose output that of a shared expert is added."""
    last, views = routed, []
    while len(last.users) == 1:
        (reader,) = last.users
        if _calls(reader, *_ADD):
            for one, other in _operands(reader):
                if one is last:
                    return _with_shared(routed, views, reader, other)
        if not _is_view(reader) and _op_name(reader) != _ALL_REDUCE:
            break
        last = reader
        views.append(reader)
    return None


def _with_shared(routed: fx.Node, views: list[fx.Node], total: fx.Node, added: Any) -> _Mixture | None:
    """The mixture, if what is added is the output of a gated MLP, with or without a weight."""
    outputs = _path(added, _ALL_REDUCE)
    scaled = down = outputs[-1]
    weight = None
    for one, other in _operands(scaled) if _calls(scaled, *_MULTIPLY) else ():
        if _calls(_source(one), *_SIGMOID):
            weight, outputs = _source(one), [*outputs, *_path(other, _ALL_REDUCE)]
            down = outputs[-1]
    hidden: Any = _source(down.args[0]) if _is_product(down) else None
    for one, other in _operands(hidden) if _calls(hidden, *_MULTIPLY) else ():
        activation, up = _source(one), _source(other)
        gate: Any = _source(activation.args[0]) if _calls(activation, *_ACTIVATIONS) else None
        if _is_product(gate) and _is_product(up):
            reduced = any(_op_name(each) == _ALL_REDUCE for each in views)
            return _Mixture(routed, tuple(views), total, gate, up, down, activation, weight, tuple(outputs), reduced)
    return None


# -- check -------------------------------------------------------------------------------------------------------------


def _reject_reason(graph: CapturedGraph, found: _Mixture, stacked: StackedExperts) -> str | None:
    """Why the shared expert stays apart, or None."""
    if found.reduced:
        return "each of the two outputs is rounded by an all-reduce of its own"
    products = (found.gate, found.up, found.down)
    if _op_name(found.routed) == _QUANTIZED or not all(_calls(each, F.linear) for each in products):
        return "weights of the experts are quantized"
    arguments, _ = normalize_call(_op, found.routed.args, found.routed.kwargs)
    x, index, weight, up, down, up_bias, _, activation, *form = arguments
    if up_bias is not None or form != [True, False, False, 0.0, 0.0, False, None]:
        return "the routed experts are not silu(gate) * up in two halves without biases"
    return (
        _other_activation(found.activation, activation)
        or _other_input(found, x)
        or _other_weights(graph, found, up, down, stacked)
        or _other_output(graph, found, (x, index, weight))
    )


def _other_activation(call: fx.Node, activation: str) -> str | None:
    name = _ACTIVATIONS[call.target]
    arguments = {**dict.fromkeys(range(1, len(call.args))), **call.kwargs}
    plain = not arguments or arguments == {"inplace": False} or arguments == {"approximate": "none"}
    return (
        None
        if plain and name == activation
        else f"the shared expert's {call.name} is not the routed experts' {activation}"
    )


def _other_input(found: _Mixture, x: fx.Node) -> str | None:
    for product in (found.gate, found.up):
        if _source(product.args[0]) is not _source(x):
            return f"{product.name} reads {product.args[0]}, not {x.name}"
    return None


def _other_weights(graph: CapturedGraph, found: _Mixture, up: Any, down: Any, stacked: StackedExperts) -> str | None:
    bound = [GraphPass.bind(each, "input", "weight", bias=None) for each in (found.gate, found.up, found.down)]
    if any(bias is not None for _, _, bias in bound):
        return "the shared expert has biases"
    own = [weight for _, weight, _ in bound]
    tensors = [graph.constant(each) for each in (up, down, *own)]
    if any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
        return "a weight of the experts is computed, not a parameter"
    kinds = {(each.dtype, each.device) for each in tensors if each is not None}
    if len(kinds) > 1:
        return "the shared expert's weights have another dtype than the routed experts'"
    _, width, inner = value(down).shape
    if [tuple(value(each).shape) for each in own] != [(inner, width), (inner, width), (width, inner)]:
        return f"the shared expert has {value(own[0]).shape[0]} inner columns, the routed ones {inner}"
    key = (up, down, *own)
    if key not in stacked and (len(set(key)) < len(key) or any(set(key) & set(other) for other in stacked)):
        return "a weight is already part of another stacked weight"
    return None


def _other_output(graph: CapturedGraph, found: _Mixture, read: Sequence[fx.Node]) -> str | None:
    if found.weight is not None and value(found.weight).shape[-1] != 1:
        return f"the shared expert's gate has {value(found.weight).shape[-1]} columns, not one"
    for output in found.outputs:
        if len(output.users) > 1:
            return f"{output.name} has further readers"
    if not same_geometry(value(found.sum), value((found.routed, *found.views)[-1])):
        return f"{found.sum.name} has another shape than the routed experts' output"
    for each in read:
        if (why := find_barrier(graph, found.routed, found.sum, storage_id(each))) is not None:
            return f"the experts cannot move to {found.sum.name}: {why}"
    return None


# -- rewrite -----------------------------------------------------------------------------------------------------------


def _rewrite(graph: CapturedGraph, found: _Mixture, stacked: StackedExperts) -> None:
    arguments, _ = normalize_call(_op, found.routed.args, found.routed.kwargs)
    x, index, weight, up, down, *rest = arguments
    gate_up_down: list[Any] = [each.args[1] for each in (found.gate, found.up, found.down)]
    key = (up, down, *gate_up_down)
    if key not in stacked:
        stacked[key] = _stack(graph, *key)
    with graph.graph.inserting_before(found.sum):
        index = graph.call(F.pad, index, (0, 1), value=value(up).shape[0])
        if found.weight is None:
            weight = graph.call(F.pad, weight, (0, 1), value=1.0)
        else:
            own = found.weight
            if value(own).dim() != 2:
                own = graph.call(torch.reshape, own, (-1, 1))
            if value(own).dtype != value(weight).dtype:
                own = graph.call(torch.Tensor.to, own, value(weight).dtype)
            weight = graph.call(torch.cat, [weight, own], -1)
        result = graph.call(_op, x, index, weight, *stacked[key], *rest[:-2], True)
    result.meta["stack_trace"] = found.routed.meta.get("stack_trace")
    found.routed.replace_all_uses_with(result)
    for view in found.views:
        found.sum.prepend(view)
    found.sum.replace_all_uses_with((result, *found.views)[-1])
    _erase_unused(graph, found.sum)
    _erase_unused(graph, found.routed)


def _stack(
    graph: CapturedGraph, up: fx.Node, down: fx.Node, gate: fx.Node, own_up: fx.Node, own_down: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """The weights of the routed experts with the shared one's after them, of which all of them become views."""
    inner = value(gate).shape[0]
    first = _stacked(graph, up, [gate, own_up])
    graph.rebind_constant(gate, first[-1, :inner])
    graph.rebind_constant(own_up, first[-1, inner:])
    second = _stacked(graph, down, [own_down])
    graph.rebind_constant(own_down, second[-1])
    return graph.add_constant(f"stacked_{up.name}", first), graph.add_constant(f"stacked_{down.name}", second)


def _stacked(graph: CapturedGraph, routed: fx.Node, own: Sequence[fx.Node]) -> Tensor:
    """The weight of the routed experts with the shared one's rows after it, of which the routed one becomes a view."""
    tensors = [tensor for node in (routed, *own) if (tensor := graph.constant(node)) is not None]
    experts, rows, width = tensors[0].shape
    whole = torch.empty(experts + 1, rows, width, dtype=tensors[0].dtype, device=tensors[0].device)
    with torch.no_grad():
        whole[:-1].copy_(tensors[0])
        torch.cat(tensors[1:], out=whole[-1])
    graph.rebind_constant(routed, whole[:-1])
    del tensors
    if whole.is_cuda:
        torch.cuda.empty_cache()  # the next layer's stack is larger than what this one freed, and would leave it unused
    return whole


def _erase_unused(graph: CapturedGraph, node: fx.Node) -> None:
    """Erase a call without readers, and then what only it read."""
    if node.users or node.op not in ("call_function", "call_method") or node.is_impure():
        return
    sources = node.all_input_nodes
    graph.graph.erase_node(node)
    for source in sources:
        _erase_unused(graph, source)
