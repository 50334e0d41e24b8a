"""Instance hooks for experts outside transformers' experts interface, which select tokens on the host."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.moe import _grouped_linear

from torchweave.models.attention import UnsupportedModel
from torchweave.models.experts import activation_name


class _Groups(NamedTuple):
    """Pairs of a token and a chosen expert, sorted by expert, without a read on the host.

    Attributes:
        order: `[T * k]`, pair `t * k + j` of each sorted pair.
        tokens: `[T * k]`, token of each sorted pair.
        ends: int32 `[E]`, end of each expert's pairs.
    """

    order: Tensor
    tokens: Tensor
    ends: Tensor


def _group_by_expert(top_k_index: Tensor, num_experts: int) -> _Groups:
    sorted_ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counted = sorted_ids.float() if sorted_ids.device.type == "cpu" else sorted_ids.int()  # histc's dtypes differ
    counts = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
    return _Groups(order, order // top_k_index.shape[1], torch.cumsum(counts, dim=0, dtype=torch.int32))


def _linear(x: Tensor, weight: Tensor, groups: _Groups, transposed: bool = False) -> Tensor:
    """Each row of `x` times its expert's weight, `[E, N, K]`, or `[E, K, N]` if transposed."""
    if x.device.type == "meta":  # shapes only: on meta, the grouped matmul supports bfloat16 only
        return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
    return _grouped_linear(x, weight, groups.ends, is_transposed=transposed)


def _unsorted(x: Tensor, groups: _Groups) -> Tensor:
    """Rows of sorted pairs in the order of tokens."""
    return torch.empty_like(x).index_copy(0, groups.order, x)


# -- DBRX ---------------------------------------------------------------------------------------------------------------


def _dbrx_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """DBRX's experts: hidden states `[1, T, K]`, index and weights `[T, k]` -> `[1, T, K]`."""
    x = hidden_states.reshape(-1, module.hidden_size)
    gate, up, down = (
        weight.view(module.num_experts, module.ffn_hidden_size, module.hidden_size)
        for weight in (module.mlp.w1, module.mlp.v1, module.mlp.w2)
    )
    groups = _group_by_expert(top_k_index, module.num_experts)
    rows = x[groups.tokens]
    rows = module.mlp.activation_fn(_linear(rows, gate, groups)) * _linear(rows, up, groups)
    rows = _unsorted(_linear(rows, down, groups, transposed=True), groups).view(*top_k_index.shape, -1)
    return (rows * top_k_weights[..., None]).sum(1).view_as(hidden_states)


def _hook_dbrx(module: Any) -> None:
    module.torchweave_grouped_mm = True
    module.forward = types.MethodType(_dbrx_forward, module)


# -- JetMoE -------------------------------------------------------------------------------------------------------------


def _jetmoe_route(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(experts, weights), both `[T, k]`."""
    logits, index = router.layer(x).float().topk(router.top_k, dim=1)
    return index, torch.softmax(logits, dim=1).type_as(x)


def _jetmoe_forward(module: Any, layer_input: Tensor) -> Tensor:
    """JetMoE's feed-forward experts, `[1, T, K]` -> `[1, T, K]`."""
    x = layer_input.flatten(0, 1)
    index, weights = _jetmoe_route(module.router, x)
    up, down = module.input_linear.weight, module.output_linear.weight
    out = torch.ops.torchweave.experts(x, index, weights, up, down, None, None, activation_name(module.activation))
    return out.view_as(layer_input) + module.bias


def _jetmoe_map(module: Any, layer_input: Tensor) -> tuple[Tensor, None, tuple[_Groups, Tensor]]:
    """Queries of the chosen attention experts, `[1, T, K]` -> `[1, T, k, H * D]`."""
    x = layer_input.flatten(0, 1)
    index, weights = _jetmoe_route(module.router, x)
    groups = _group_by_expert(index, module.num_experts)
    queries = _unsorted(_linear(x[groups.tokens], module.input_linear.weight, groups), groups)
    return queries.view(*layer_input.shape[:2], module.top_k, -1), None, (groups, weights)


def _jetmoe_reduce(module: Any, layer_input: Tensor, topo_info: tuple[_Groups, Tensor]) -> Tensor:
    """Output projections of the chosen attention experts, `[1, T, k, H * D]` -> `[1, T, K]`."""
    groups, weights = topo_info
    rows = _linear(layer_input.flatten(0, 2)[groups.order], module.output_linear.weight, groups)
    rows = _unsorted(rows, groups).view(*layer_input.shape[:3], -1)
    return (rows * weights[None, ..., None]).sum(2) + module.bias


def _hook_jetmoe(module: Any) -> None:
    if activation_name(module.activation) is None:
        raise UnsupportedModel(
            f"JetMoeMoE has the activation {module.activation}, which the experts op does not support."
        )
    module.forward = types.MethodType(_jetmoe_forward, module)


def _hook_jetmoe_attention(module: Any) -> None:
    module.torchweave_grouped_mm = True
    module.map = types.MethodType(_jetmoe_map, module)
    module.reduce = types.MethodType(_jetmoe_reduce, module)


# -- LongCat ------------------------------------------------------------------------------------------------------------


def _longcat_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """LongCat's experts `[T, K]` -> `[T, K]`; an index after the routed experts is the identity."""
    routed, weights = module.num_routed_experts, top_k_weights.to(hidden_states.dtype)
    identity = torch.where(top_k_index >= routed, weights, 0.0).sum(1, keepdim=True) * hidden_states
    up, activation = module.gate_up_proj[:routed], activation_name(module.act_fn)
    out = torch.ops.torchweave.experts(
        hidden_states, top_k_index, weights, up, module.down_proj, None, None, activation
    )
    return out + identity


def _hook_longcat(module: Any) -> None:
    if activation_name(module.act_fn) is None:
        raise UnsupportedModel(
            f"LongcatFlashExperts has the activation {module.act_fn}, which the experts op does not support."
        )
    module.forward = types.MethodType(_longcat_forward, module)


def _reject_doge(module: Any) -> None:
    raise UnsupportedModel(
        "DogeCDMoE routes a token by the router's scores of other tokens of its input; choose a Doge without experts."
    )


EXPERT_HOOKS: dict[str, Callable[[Any], None]] = {
    "DogeCDMoE": _reject_doge,
    "DbrxExperts": _hook_dbrx,
    "JetMoeMoE": _hook_jetmoe,
    "JetMoeMoA": _hook_jetmoe_attention,
    "LongcatFlashExperts": _hook_longcat,
}
"""Hooks by the name of the module's class."""
