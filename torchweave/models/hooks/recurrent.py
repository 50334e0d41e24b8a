"""Recurrent layers (linear attention, state space, short convolution): their token-mixing functions become boundary ops.

With `cache_params=None`, transformers' mixers mix tokens only through functions of their module, such as `causal_conv1d_fn`. An
instance of a mixer gets copies of its methods whose globals name the engine's functions instead; class and module stay unchanged.
Projections, gates and norms remain in the captured graph.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweave.ops.recurrent.op  # noqa: F401  (defines the ops)

_ops: Any = torch.ops.torchweave


def _causal_conv(state: int) -> Callable[..., Tensor]:
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """hidden_states `[1, C, T]`, weight `[C, K]` -> `[1, C, T]`."""
        x = hidden_states[0].transpose(0, 1).to(weight.dtype)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _ops.causal_conv(x, weight, bias, out, state, activation or "")
        return out.transpose(0, 1)[None].to(hidden_states.dtype)

    return causal_conv1d_fn


def _gated_delta(state: int) -> Callable[..., tuple[Tensor, None]]:
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query, key `[1, T, H, K]`, value `[1, T, HV, V]`, g `[1, T, HV]` or `[1, T, HV, K]`, beta `[1, T, HV]`."""
        out = torch.empty(value.shape[1:], dtype=value.dtype, device=value.device)
        _ops.gated_delta(query[0], key[0], value[0], g[0], beta[0], out, state, use_qk_l2norm_in_kernel)
        return out[None], None

    return chunk_gated_delta_rule


def _ssd(state: int) -> Callable[..., Tensor]:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        z: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states `[1, T, H, P]`, dt `[1, T, H]`, A `[H]`, B, C `[1, T, G, N]` -> `[1, T, H, P]`."""
        assert z is None, "the mixers gate after the scan"
        x = hidden_states[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        low, high = (float(limit) for limit in dt_limit)
        _ops.ssd(x, dt[0], A, B[0], C[0], D, dt_bias, out, state, dt_softplus, low, high)
        return out[None]

    return mamba2_chunk_scan


def _selective_scan(state: int) -> Callable[..., Tensor]:
    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        """hidden_states, dt, z `[1, I, T]`, A `[I, N]`, B, C `[1, N, T]` -> `[1, I, T]`."""
        assert delta_softplus, "the op applies softplus to dt"
        x, dt, B, C = (each[0].transpose(0, 1) for each in (hidden_states, dt, B, C))
        gate = None if z is None else z[0].transpose(0, 1)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _ops.selective_scan(x, dt, A, B, C, D, gate, delta_bias, out, state)
        return out.transpose(0, 1)[None]

    return mamba_selective_scan


_REPLACEMENTS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective_scan,
}
"""Functions of transformers' modules that mix tokens, and makers of their replacements by the index of a state."""


def _lightning_attention(state: int) -> Callable[..., tuple[Tensor, None]]:
    def forward(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """MiniMax's decay attention (arXiv 2501.08313) of `[1, T, hidden]`: `torchweave::ssd` with a constant decay a head."""
        tokens, heads, head_dim = hidden_states.shape[1], module.num_attention_heads, module.head_dim
        fused = module.act_fn(module.qkv_proj(hidden_states)).view(tokens, heads, 3 * head_dim)
        q, k, v = fused.split(head_dim, dim=2)
        decay = -module.slope_rate.flatten().float()
        out = torch.empty(tokens, heads, head_dim, dtype=v.dtype, device=v.device)
        steps = torch.ones(tokens, heads, dtype=torch.float32, device=v.device)
        _ops.ssd(v, steps, decay, k, q, None, None, out, state, False, 0.0, float("inf"))
        mixed = module.norm(out.view(1, tokens, heads * head_dim))
        return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * mixed), None

    return forward


def _rg_lru_block(state: int) -> Callable[..., tuple[Tensor, None]]:
    def forward(module: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """RecurrentGemma's recurrent block (Griffin, arXiv 2402.19427) of `[1, T, hidden]`: convolution and RG-LRU are ops."""
        conv_out = _causal_conv(state)(
            module.linear_x(input_states).transpose(1, 2), module.conv_1d.weight.squeeze(1), module.conv_1d.bias
        )
        mixed = _rg_lru(module.rg_lru, conv_out[0].transpose(0, 1), position_ids[0], state + 1)
        return module.linear_out(mixed[None] * module.act_fn(module.linear_y(input_states))), None

    return forward


def _rg_lru(module: Any, x: Tensor, positions: Tensor, state: int) -> Tensor:
    """x `[T, I]`, positions `[T]` -> `[T, I]`."""
    tokens, width = x.shape
    by_head = x.view(tokens, module.num_attention_heads, module.block_width).transpose(0, 1)

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).reshape(tokens, width))

    input_gate = gate(module.input_gate_weight, module.input_gate_bias)
    log_decay = (
        -8.0 * gate(module.recurrent_gate_weight, module.recurrent_gate_bias) * F.softplus(module.recurrent_param)
    )
    # The first token of a request is not scaled down: no state is mixed with it.
    scale = torch.where((positions == 0)[:, None], 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    _ops.rg_lru(torch.exp(log_decay), x * input_gate * scale.to(x.dtype), out, state)
    return out


def _zamba_mixer(state: int) -> Callable[..., Tensor]:
    def forward(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zamba's mixer (arXiv 2405.16712) of `[1, T, hidden]`: a scan of Mamba for each head."""
        heads, head_dim = module.n_mamba_heads, module.mamba_head_dim
        x, gate = module.in_proj(hidden_states)[0].unflatten(-1, (-1, 2)).unbind(-1)
        weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
        mixed = _causal_conv(state)(x.transpose(0, 1)[None], weight, bias, activation=module.activation)[0]
        widths = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        decay, outputs = -torch.exp(module.A_log.float()), []
        for head in range(heads):
            channels = slice(head * head_dim, (head + 1) * head_dim)
            dt, B, C = (module.x_proj_weight[head] @ mixed[channels]).split(widths)
            scanned = _selective_scan(state + 1 + head)(
                mixed[None, channels],
                (module.dt_proj_weight[head] @ dt)[None],
                decay[head],
                B[None],
                C[None],
                D=module.D[head].float(),
                z=gate.transpose(0, 1)[None, channels],
                delta_bias=module.dt_proj_bias[head].float(),
                delta_softplus=True,
            )
            outputs.append(scanned[0].transpose(0, 1))
        return module.out_proj(torch.cat(outputs, dim=1).to(hidden_states.dtype)[None])

    return forward


def _zaya_projection(state: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def forward(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[1, T, H, D]` of Zaya's convolutional attention (arXiv 2510.04476) of `[1, T, hidden]`.

        A depthwise convolution, then one that mixes the channels of a head. The second reads earlier results of the first, which
        are convolutions of their own here, with the kernel moved by as many tokens.
        """
        projected = module.q_proj(hidden_states), module.k_proj(hidden_states)
        queries, keys = (each.unflatten(-1, (-1, module.head_dim)) for each in projected)
        query_residual = (queries + keys.repeat_interleave(module.num_key_value_groups, dim=2)) * 0.5
        key_residual = query_residual.unflatten(2, (-1, module.num_key_value_groups)).mean(dim=3)
        x, first, second = (
            torch.cat(projected, dim=-1).transpose(1, 2),
            module.conv_qk_depthwise,
            module.conv_qk_grouped,
        )
        parts, last = [], module.grouped_kernel_size - 1
        for delay in range(last + 1):
            kernel = F.pad(first.weight.squeeze(1), (last - delay, delay))
            delayed = _causal_conv(state + delay)(x, kernel, first.bias)[0].unflatten(0, (second.groups, -1))
            parts.append(second.weight[:, :, last - delay].unflatten(0, (second.groups, -1)) @ delayed)
        mixed = (torch.stack(parts).sum(0).flatten(0, 1).transpose(0, 1) + second.bias).unflatten(
            -1, (-1, module.head_dim)
        )[None]
        mixed_queries, mixed_keys = mixed.split([queries.shape[2], keys.shape[2]], dim=2)
        # The second half of the values is the previous token's.
        values = F.linear(hidden_states, module.v_proj_delayed.weight).transpose(1, 2)
        previous = F.pad(values.new_ones(values.shape[1], 1), (0, 1))
        values = _causal_conv(state + last + 1)(values, previous).transpose(1, 2)
        if module.v_proj_delayed.bias is not None:
            values = values + module.v_proj_delayed.bias
        values = torch.cat([module.v_proj_current(hidden_states), values], dim=-1)
        return mixed_queries + query_residual, mixed_keys + key_residual, values.unflatten(-1, (-1, module.head_dim))

    return forward


def _dynamic_conv(state: int) -> Callable[..., Tensor]:
    def forward(module: Any, hidden_states: Tensor, dynamic_input: Tensor, **_: Any) -> Tensor:
        """Inkling 2's convolution of `[1, T, C]`, with a kernel for each token: the op moves inputs, the graph sums them."""
        taps, x = module.conv_kernel_size, hidden_states.float()
        dynamic = module.weight_proj(dynamic_input).float().unflatten(-1, (module.num_heads, 1, taps))
        kernel = module.static_weight.float().T.reshape(module.num_heads, -1, taps) + dynamic
        mixed = x.unflatten(-1, (module.num_heads, -1)) * kernel[..., 0]
        for lag in range(1, taps):
            one_hot = F.pad(x.new_ones(x.shape[2], 1), (0, lag))
            earlier = _causal_conv(state + lag - 1)(x.transpose(1, 2), one_hot).transpose(1, 2)
            mixed = mixed + earlier.unflatten(-1, (module.num_heads, -1)) * kernel[..., lag]
        return ((mixed.flatten(2) + x) / (2 * taps + 1) ** 0.5).to(hidden_states.dtype)

    return forward


def _previous(x: Tensor, state: int) -> Tensor:
    """The input of the token before, `[1, T, C]`; zeros for a request's first token."""
    one_hot = F.pad(x.new_ones(x.shape[2], 1), (0, 1))
    return _causal_conv(state)(x.transpose(1, 2), one_hot).transpose(1, 2)


def _rwkv_attention(first: int) -> Callable[..., tuple[Tensor, None]]:
    def forward(module: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """RWKV-4's mixing of tokens (arXiv 2305.13048) of `[1, T, hidden]`: a weighted mean of values, by sums of the RG-LRU op.

        transformers subtracts a running maximum from the exponents. Without it sums leave the range of float32 where keys are
        above 88 or all below -69; the result is then NaN, by which the engine ends the request with an error.
        """
        shifted = _previous(hidden, first)

        def mixed(weight: Tensor) -> Tensor:
            return hidden * weight + shifted * (1 - weight)

        key, value = module.key(mixed(module.time_mix_key)).float(), module.value(mixed(module.time_mix_value))
        receptance = torch.sigmoid(module.receptance(mixed(module.time_mix_receptance)))
        weight = torch.exp(key)
        terms = torch.cat([weight * value, weight], dim=-1)
        earlier = _previous(terms, first + 1)[0].contiguous()
        decay = torch.exp(-torch.exp(module.time_decay.float())).repeat(2).expand(earlier.shape).contiguous()
        sums = torch.empty(earlier.shape, dtype=earlier.dtype, device=earlier.device)
        _ops.rg_lru(decay, earlier, sums, first + 2)
        bonus = torch.exp(module.time_first.float()).repeat(2)
        total, count = (sums[None] + bonus * terms).chunk(2, dim=-1)
        mean = (total / torch.where(count > _LEAST_WEIGHT, count, torch.nan)).to(value.dtype)
        return module.output(receptance * mean) / _rwkv_scale(module), None

    return forward


_LEAST_WEIGHT = 1e-30  # sums of weights below are no longer exact in float32


def _rwkv_feed_forward(state: int) -> Callable[..., tuple[Tensor, None]]:
    def forward(module: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """RWKV-4's feed-forward of `[1, T, hidden]`, which reads the token before."""
        shifted = _previous(hidden, state)
        key = module.key(hidden * module.time_mix_key + shifted * (1 - module.time_mix_key))
        receptance = module.receptance(hidden * module.time_mix_receptance + shifted * (1 - module.time_mix_receptance))
        return torch.sigmoid(receptance) * module.value(torch.square(torch.relu(key))) / _rwkv_scale(module), None

    return forward


def _rwkv_scale(module: Any) -> int:
    """The power of two by which transformers divides a layer's output weights in its first forward: for results it is exact too."""
    interval = module.config.rescale_every
    return 2 ** (module.layer_id // interval) if interval > 0 else 1


def _keep_rwkv_weights(model: nn.Module) -> None:
    """RWKV's model divides weights in its first forward; the hooked layers divide results instead (`_rwkv_scale`)."""
    for module in model.modules():
        if type(module).__name__ == "RwkvModel":
            module.layers_are_rescaled = True  # type: ignore[assignment]


_FORWARD_BY_CLASS: dict[str, tuple[Callable[[int], Callable[..., Any]], Callable[[Any], int]]] = {
    "MiniMaxLightningAttention": (_lightning_attention, lambda _: 1),
    "RwkvSelfAttention": (_rwkv_attention, lambda _: 3),
    "RwkvFeedForward": (_rwkv_feed_forward, lambda _: 1),
    "RecurrentGemmaRecurrentBlock": (_rg_lru_block, lambda _: 2),
    "Inkling2DynamicShortConvolution": (_dynamic_conv, lambda module: module.conv_kernel_size - 1),
    "ZambaMambaMixer": (_zamba_mixer, lambda module: 1 + module.n_mamba_heads),
    "ZayaCCAProjection": (_zaya_projection, lambda module: 1 + module.grouped_kernel_size),
}
"""For layers that mix tokens inline, by class: a maker of the whole forward by its first state, and a module's number of states."""


def hook_recurrent_layers(model: nn.Module) -> list[str]:
    """Replace the token-mixing functions of recurrent layers; returns the hooked classes. Every call has a state of its own."""
    hooked, state = set(), 0
    _keep_rwkv_weights(model)
    for module in model.modules():
        methods = dict(_methods_to_replace(type(module)))
        if type(module).__name__ in _FORWARD_BY_CLASS:
            make_forward, count_states = _FORWARD_BY_CLASS[type(module).__name__]
            module.forward = types.MethodType(make_forward(state), module)
            state += count_states(module)
        elif methods:
            names = sorted({name for names in methods.values() for name in names})
            replacements = {name: _REPLACEMENTS[name](state + index) for index, name in enumerate(names)}
            state += len(names)
            for method in methods:
                copy = with_globals(getattr(type(module), method), replacements)
                setattr(module, method, types.MethodType(copy, module))
        else:
            continue
        hooked.add(type(module).__name__)
        module.torchweave_recurrent = True  # type: ignore[assignment]
    return sorted(hooked)


def _methods_to_replace(cls: type[nn.Module]) -> Iterator[tuple[str, list[str]]]:
    """Methods of a class that call functions of `_REPLACEMENTS`, with the names of those functions."""
    if not cls.__module__.startswith("transformers"):
        return
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        code = getattr(inspect.unwrap(function), "__code__", None)
        called = [each for each in _REPLACEMENTS if code is not None and each in code.co_names]
        if called:
            yield name, called


def with_globals(function: Any, replacements: dict[str, Any]) -> types.FunctionType:
    """A copy of a function whose global names include `replacements`."""
    original = inspect.unwrap(function)
    # Without __name__, Dynamo would guard on the globals of the original module, where these names are other functions.
    own = {**original.__globals__, **replacements}
    own.pop("__name__", None)
    copy = types.FunctionType(original.__code__, own, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


VERIFIED = frozenset(
    {
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text", "inkling_text", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe",
        "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
"""Model types whose tokens equal transformers': others may have a further state that no hook reaches (docs/reference/models.md)."""

# Layers with a recurrent state, by their name in `config.layer_types`.
_RECURRENT_KINDS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe_mamba", "hybrid", "rwkv"}
)


def recurrent_kinds(config: Any) -> list[str]:
    """The kind of each layer with a recurrent state, as far as the config lists the kinds of its layers."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return [kind for kind in kinds if kind in _RECURRENT_KINDS]


def is_recurrent(module: nn.Module) -> bool:
    """Whether `hook_recurrent_layers` has changed the module."""
    return getattr(module, "torchweave_recurrent", False) is True


def count_hooked(model: nn.Module) -> int:
    """Number of mixers that `hook_recurrent_layers` has changed."""
    return sum(map(is_recurrent, model.modules()))
