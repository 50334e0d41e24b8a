"""Instance hooks for attention outside transformers' attention interface."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from torchweave.models.attention import UnsupportedModel, attention_forward, layer_number
from torchweave.models.hooks.recurrent import with_globals


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """`[1, T, H * D]` -> `[1, H, T, D]`."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _linear_heads(hidden_states: Tensor, head_dim: int, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Heads `[1, H, T, D]` of hidden states `[1, T, K]`, by each of `linears`."""
    return tuple(_heads(linear(hidden_states), head_dim) for linear in linears)


def _bert_forward(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """BERT's self-attention, `[1, T, K]` -> `[1, T, H * D]`; the output projection is in another module."""
    query, key, value = _linear_heads(hidden_states, module.attention_head_size, module.query, module.key, module.value)
    out, _weights = attention_forward(module, query, key, value, attention_mask)
    return out.flatten(2), None


def _hook_bert(module: Any) -> None:
    module.is_causal = getattr(module, "is_decoder", True)
    module.forward = types.MethodType(_bert_forward, module)


def _roformer_forward(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None, sinusoidal_pos: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """RoFormer's self-attention: BERT's with interleaved rotary embedding of queries, keys and, by option, values."""
    query, key, value = _linear_heads(hidden_states, module.attention_head_size, module.query, module.key, module.value)
    if module.rotary_value:
        query, key, value = module.apply_rotary_position_embeddings(sinusoidal_pos, query, key, value)
    else:
        query, key = module.apply_rotary_position_embeddings(sinusoidal_pos, query, key)
    out, _weights = attention_forward(module, query, key, value, attention_mask)
    return out.flatten(2), None


def _hook_roformer(module: Any) -> None:
    module.is_causal = module.is_decoder
    module.forward = types.MethodType(_roformer_forward, module)


def _bart_forward(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Self-attention of the BART family, `[1, T, K]` -> `[1, T, K]`."""
    query, key, value = _linear_heads(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    out, _weights = attention_forward(module, query, key, value, attention_mask, scaling=module.scaling)
    return module.out_proj(out.flatten(2)), None


def _openai_attn(
    self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *_: Any
) -> list[Tensor]:
    """GPT's attention: query and value `[1, H, T, D]`, key `[1, H, D, T]` -> `[1, H, T, D]`."""
    scale = value.shape[-1] ** -0.5 if self.scale else 1.0
    out, _weights = attention_forward(self, query, key.transpose(2, 3), value, attention_mask, scaling=scale)
    return [out.transpose(1, 2)]


def _hook_openai(module: Any) -> None:
    for index, block in enumerate(module.h):
        block.attn.layer_idx = index
        block.attn._attn = types.MethodType(_openai_attn, block.attn)


def _diffllama_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """DiffLlama's attention; one call with values twice as wide replaces two calls over the same queries and keys."""
    query, key, value = _linear_heads(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    rotate = inspect.getmodule(type(module)).apply_rotary_pos_emb  # type: ignore[union-attr]
    query, key = rotate(query, key, *position_embeddings)
    value = torch.cat(torch.chunk(value, 2, dim=1), dim=-1).repeat(1, 2, 1, 1)
    out, _weights = attention_forward(module, query, key, value, attention_mask, scaling=module.scaling)
    first, second = torch.chunk(out, 2, dim=2)
    lambda_1 = torch.exp(torch.sum(module.lambda_q1 * module.lambda_k1, dim=-1, dtype=torch.float32)).to(query.dtype)
    lambda_2 = torch.exp(torch.sum(module.lambda_q2 * module.lambda_k2, dim=-1, dtype=torch.float32)).to(query.dtype)
    out = first - (lambda_1 - lambda_2 + module.lambda_init) * second
    out = (1 - module.lambda_init) * module.groupnorm(out)
    return module.o_proj(out.flatten(2)), None


def _recurrent_depth_forward(
    self: nn.Module, hidden_states: Tensor, *args: Any, cycle_offset: int = 0, **given: Any
) -> Any:
    """HRM's attention, whose module runs once per cycle, each time with keys and values of its own."""
    return type(self).forward(self, hidden_states, *args, layer_offset=cycle_offset, **given)


def _doge_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Doge's attention; the bias of each key becomes one more channel of the key, which every query reads with the same weight.

    Keys are dropped by their bias in sequences longer than `keep_window_size` only, which limits `max_model_len`.
    """
    query = module.q_norm(module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
    value = module.v_proj(hidden_states)
    bias = torch.exp(module.A * nn.functional.softplus(module.dt_proj(value))).transpose(1, 2)[..., None]
    rotate = inspect.getmodule(type(module)).apply_rotary_pos_emb  # type: ignore[union-attr]
    query, key = rotate(query, key, *position_embeddings)
    query = torch.cat((query, torch.full_like(query[..., :1], 1.0 / module.scaling)), dim=-1)
    key = torch.cat((key, bias.to(key.dtype)), dim=-1)
    value = _heads(value, module.head_dim)
    out, _weights = attention_forward(module, query, key, value, attention_mask, scaling=module.scaling)
    return module.o_proj(out.flatten(2)), None


# -- bias by distance (Inkling) ----------------------------------------------------------------------------------------


def _relative(
    module: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Attention with a bias by distance: query, key, value `[1, T, H, D]`, bias `[T, H, distances]` -> `[1, T, H * D]`."""
    out = torch.empty_like(query[0])
    window = module.sliding_window or 0
    torch.ops.torchweave.relative_attention(
        query[0], key[0], value[0], bias, out, layer_number(module), module.scaling, window, sinks
    )
    return out.flatten(1)[None]


def _inkling_forward(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Inkling's attention, whose keys and values are convolved."""
    key, value = module.k_sconv(module.k_proj(hidden_states)), module.v_sconv(module.v_proj(hidden_states))
    query, key, value = (
        each.unflatten(-1, (-1, module.head_dim)) for each in (module.q_proj(hidden_states), key, value)
    )
    bias = module.r_proj(hidden_states)[0].unflatten(-1, (module.num_heads, -1)) @ module.rel_logits_proj.proj
    return module.o_proj(_relative(module, module.q_norm(query), module.k_norm(key), value, bias)), None


def _hook_inkling(module: Any) -> None:
    if module.config.log_scaling_n_floor is not None:
        raise UnsupportedModel(
            "inkling scales queries by the logarithm of their position (log_scaling_n_floor), which Torchweave does not."
        )
    module.forward = types.MethodType(_inkling_forward, module)


def _inkling2_forward(
    module: Any,
    hidden_states: Tensor,
    key_hidden_states: Tensor | None = None,
    value_hidden_states: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Inkling 2's attention; layers without a window have inputs of their own for keys and values."""
    distances, sinks = module.relative_position_bias, module.sink_proj(hidden_states)[0]
    key = module.k_proj(hidden_states if key_hidden_states is None else key_hidden_states)
    value = module.v_proj(hidden_states if value_hidden_states is None else value_hidden_states)
    query, key, value = (each.transpose(1, 2) for each in (module.q_proj(hidden_states, position_ids), key, value))
    relative = distances.linear(hidden_states).unflatten(-1, (distances.num_heads, -1))
    bias = distances.norm(relative, position_ids)[0] @ distances.proj
    return module.o_proj(_relative(module, query, key, value, bias, sinks), hidden_states), None


def _inkling2_forward_of_5_23(
    module: Any,
    hidden_states: Tensor,
    key_hidden_states: Tensor | None = None,
    value_hidden_states: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same with the modules of transformers before 5.24."""
    gate, sinks = module.gate_proj(hidden_states), module.sink_proj(hidden_states)[0]
    query = module.q_l2_clip(module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim)))
    relative = module.rel_l2_clip(module.r_proj(hidden_states).unflatten(-1, (module.num_heads, -1)))
    if key_hidden_states is None or value_hidden_states is None:
        key, value = module.k_sconv(module.k_proj(hidden_states)), module.v_sconv(module.v_proj(hidden_states))
    else:
        key = module.k_sconv(module.k_proj(key_hidden_states), key_hidden_states)
        value = module.v_sconv(module.v_proj(value_hidden_states), value_hidden_states)
        assert position_ids is not None, "the model passes positions"
        far = ((position_ids + 1).float() / module.config.log_scaling_n_floor).clamp(min=1.0)
        temperature = (1.0 + module.config.log_scaling_alpha * torch.log(far))[..., None, None]
        query, relative = ((each.float() * temperature).to(each.dtype) for each in (query, relative))
    key, value = (each.unflatten(-1, (-1, module.head_dim)) for each in (key, value))
    value = module.v_norm(value.float()).to(value.dtype)
    out = _relative(module, query, module.k_l2_clip(key), value, relative[0] @ module.rel_logits_proj.proj, sinks)
    return module.o_proj((out.float() * torch.sigmoid(gate.float())).to(out.dtype)), None


def _hook_inkling2(module: Any) -> None:
    is_new = hasattr(module, "relative_position_bias")
    module.forward = types.MethodType(_inkling2_forward if is_new else _inkling2_forward_of_5_23, module)


def _block_residual_forward(module: Any, block_states: Tensor, partial_block_states: Tensor) -> tuple[Tensor, ...]:
    """Inkling 2's attention of each token to its own states after earlier blocks, `[1, T, blocks, hidden]` and `[1, T, hidden]`.

    transformers calls it through the interface of attention between tokens, which this is not.
    """
    states = module.norm(torch.cat([block_states, partial_block_states.unsqueeze(-2)], dim=-2).float())
    queries = module.query.float().view(-1, states.shape[-1]).expand(*states.shape[:-2], -1, -1)
    return nn.functional.scaled_dot_product_attention(queries, states, states).unbind(-2)


def _hook_inkling2_model(module: Any) -> None:
    """Without the distances of all tokens from all tokens, which the hooked attention does not read."""
    forward = with_globals(type(module).forward, {"get_relative_distance": lambda *_, **__: None})
    module.forward = types.MethodType(forward, module)


# -- ALiBi --------------------------------------------------------------------------------------------------------------


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes, float32 `[H]`, computed on the device (arXiv 2108.12409; Bloom and MPT agree for any number of heads)."""
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is not above H
    exponents = torch.arange(1, power + 1, device=device) * (8.0 / power)
    if power < num_heads:
        others = torch.arange(1, 2 * (num_heads - power), 2, device=device) * (4.0 / power)
        exponents = torch.cat((exponents, others))
    return torch.exp2(-exponents)


def _bloom_forward(model: Any, input_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:
    """Bloom's layers with slopes instead of the bias tensor."""
    hidden = model.word_embeddings_layernorm(model.word_embeddings(input_ids))
    slopes = alibi_slopes(model.num_heads, hidden.device)
    for block in model.h:
        hidden = block(hidden, alibi=slopes, attention_mask=None)[0]
    return BaseModelOutputWithPast(last_hidden_state=model.ln_f(hidden))


def _bloom_attention_forward(
    module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Bloom's attention with its residual connection, `[1, T, K]` -> `[1, T, K]`."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    out, _weights = attention_forward(
        module, query, key, value, attention_mask, scaling=module.inv_norm_factor, alibi_slopes=alibi
    )
    return module.dense(out.flatten(2)) + residual, None


def _mpt_forward(model: Any, input_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:
    """MPT's layers with slopes instead of the bias tensor."""
    hidden = model.wte(input_ids)
    slopes = alibi_slopes(model.num_heads, hidden.device)
    for block in model.blocks:
        hidden = block(hidden, position_bias=slopes, attention_mask=None)[0]
    return BaseModelOutputWithPast(last_hidden_state=model.norm_f(hidden))


def _mpt_attention_forward(
    module: Any, hidden_states: Tensor, position_bias: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """MPT's attention, `[1, T, K]` -> `[1, T, K]`."""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (_heads(part, module.head_dim) for part in fused.chunk(3, dim=2))
    out, _weights = attention_forward(
        module, query, key, value, attention_mask, scaling=module.softmax_scale, alibi_slopes=position_bias
    )
    return module.out_proj(out.flatten(2)), None


def _check_big_bird(module: Any) -> None:
    if module.attention_type != "original_full":
        raise UnsupportedModel(
            f"{type(module).__name__} has attention_type {module.attention_type}, whose sparse blocks are not causal; only "
            "original_full can be served."
        )


def _hook_zamba(module: Any) -> None:
    """Zamba's attentions share weights and have no index of their own."""
    for index, layer in enumerate(module.layers):
        if hasattr(layer, "shared_transf"):
            layer.shared_transf.self_attn.layer_idx = index


def _hook_attn_method(scale: Callable[[Any], float]) -> Callable[[nn.Module], None]:
    """Replace `_attn(query, key, value, mask)`, all `[1, H, T, D]`, which returns that layout as well."""

    def _attn(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        window = getattr(self, "torchweave_window", 0)
        query, key = query.to(value.dtype), key.to(value.dtype)
        out, _ = attention_forward(self, query, key, value, attention_mask, scaling=scale(self), sliding_window=window)
        return out.transpose(1, 2), None

    def hook(module: Any) -> None:
        module._attn = types.MethodType(_attn, module)

    return hook


def _falcon_forward(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Falcon's attention: fused q/k/v `[1, T, (H + 2 KH) D]`, rotary, one KV head per group (or in all)."""
    tokens, head_dim = hidden_states.shape[1], module.head_dim
    fused = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:
        groups = module.num_kv_heads
        fused = fused.view(1, tokens, groups, module.num_heads // groups + 2, head_dim)
        query, key, value = fused[:, :, :, :-2].flatten(2, 3), fused[:, :, :, -2], fused[:, :, :, -1]
    elif module.multi_query:  # not `_split_heads`, whose index lists are copied from the host in each step
        fused = fused.view(1, tokens, module.num_heads + 2, head_dim)
        query, key, value = fused[:, :, :-2], fused[:, :, -2:-1], fused[:, :, -1:]
    else:
        query, key, value = module._split_heads(fused)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    assert position_embeddings is not None, "the hook rejects Falcon without RoPE"
    rotate = inspect.getmodule(type(module)).apply_rotary_pos_emb  # type: ignore[union-attr]
    query, key = rotate(query, key, *position_embeddings)
    out, _weights = attention_forward(module, query, key, value, attention_mask)
    return module.dense(out.reshape(1, tokens, module.num_heads * head_dim)), None


def _hook_falcon(module: Any) -> None:
    if module.config.alibi:
        raise UnsupportedModel(
            "falcon with ALiBi rounds its bias by position to bfloat16 in every dtype, which the attention op does not; choose a "
            "Falcon with rotary positions."
        )
    module.forward = types.MethodType(_falcon_forward, module)


def _hook_gpt_neo(module: Any) -> None:
    """GPT-Neo: unscaled scores, layer index `layer_id`, local attention in a mask buffer."""
    module.layer_idx = module.layer_id
    module.torchweave_window = module.config.window_size if module.attention_type == "local" else 0
    _hook_attn_method(lambda _: 1.0)(module)


def _hook_mask_window(module: Any) -> None:
    """Read the sliding window, which these models apply in their mask only, from the config."""
    module.torchweave_window = module.config.sliding_window or 0


def _llama4_layer_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
    """The original layer with token positions passed to its attention."""
    positions = given["position_ids"]
    return type(self).forward(self, hidden_states, *args, token_positions=positions, **given)


def _hook_llama4_layer(module: Any) -> None:
    """Llama 4 scales queries of layers without RoPE by their index in the input; use their positions instead."""
    inner = module.self_attn
    if inner.attn_temperature_tuning and not inner.use_rope:
        inner.attn_temperature_tuning = False
        inner.torchweave_temperature = (float(inner.attn_scale), float(inner.floor_scale))
        module.forward = types.MethodType(_llama4_layer_forward, module)


ATTENTION_HOOKS: dict[str, Callable[[Any], None]] = {
    "FalconAttention": _hook_falcon,
    "GPTJAttention": _hook_attn_method(lambda m: m.head_dim**-0.5),
    "CodeGenAttention": _hook_attn_method(lambda m: m.head_dim**-0.5),
    "GPTNeoSelfAttention": _hook_gpt_neo,
    "Llama4TextDecoderLayer": _hook_llama4_layer,
    "PhimoeAttention": _hook_mask_window,
    "GPTNeoXJapaneseAttention": _hook_attn_method(lambda m: 1.0 / float(m.norm_factor)),
    "BigBirdModel": _check_big_bird,
    **dict.fromkeys(
        ("BigBirdSelfAttention", "GitSelfAttention", "MegatronBertSelfAttention", "RemBertSelfAttention"), _hook_bert
    ),
    "RoFormerSelfAttention": _hook_roformer,
    "OpenAIGPTModel": _hook_openai,
    "InklingAttention": _hook_inkling,
    "Inkling2SlidingAttention": _hook_inkling2,
    "Inkling2FullAttention": _hook_inkling2,
    "Inkling2TextModel": _hook_inkling2_model,
    "ZambaModel": _hook_zamba,
}
"""Hooks by the name of the module's class."""

ATTENTION_FORWARD_OF: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("MvpAttention", "TrOCRAttention", "XGLMAttention"), _bart_forward),
    "BloomModel": _bloom_forward,
    "BloomAttention": _bloom_attention_forward,
    "MptModel": _mpt_forward,
    "MptAttention": _mpt_attention_forward,
    "Inkling2BlockAttentionResidual": _block_residual_forward,
    "DiffLlamaAttention": _diffllama_forward,
    "DogeAttention": _doge_forward,
    "HrmTextAttention": _recurrent_depth_forward,
}
"""Forwards that replace a module's, by the name of its class."""
