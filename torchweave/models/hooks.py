"""Instance hooks: attention outside transformers' interface, length-dependent RoPE, and padding warnings.

Each hook sets a bound method on one module. Classes, and so other models of the process, stay unchanged.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchweave.models.attention import UnsupportedModel, attention_forward
from torchweave.models.attention_hooks import ATTENTION_HOOKS
from torchweave.models.expert_hooks import EXPERT_HOOKS
from torchweave.models.position_hooks import POSITION_HOOKS
from torchweave.report import Report

# -- attention outside transformers' interface -------------------------------------------------------------------------


def _make_attn_method(scale: Callable[[nn.Module], float], heads_first: bool) -> Callable[..., Any]:
    """A replacement of `_attn(query, key, value, mask)`, all `[1, H, T, D]`; `heads_first` keeps that layout in the output."""

    def _attn(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        window = getattr(self, "torchweave_window", 0)
        query, key = query.to(value.dtype), key.to(value.dtype)
        out, _ = attention_forward(self, query, key, value, attention_mask, scaling=scale(self), sliding_window=window)
        return (out.transpose(1, 2) if heads_first else out), None

    return _attn


def _falcon_forward(
    self: nn.Module,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Falcon's attention: fused q/k/v `[1, T, (H + 2 KH) D]`, rotary, one KV head per group (or in all)."""
    module: Any = self
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
    rotate = inspect.getmodule(type(self)).apply_rotary_pos_emb  # type: ignore[union-attr]
    query, key = rotate(query, key, *position_embeddings)
    out, _weights = attention_forward(self, query, key, value, attention_mask)
    return module.dense(out.reshape(1, tokens, module.num_heads * head_dim)), None


def _hook_falcon(module: Any) -> None:
    if module.config.alibi:
        raise UnsupportedModel(
            "falcon with ALiBi rounds its bias by position to bfloat16 in every dtype, which the attention op does not; choose a "
            "Falcon with rotary positions."
        )
    module.forward = types.MethodType(_falcon_forward, module)


def _hook_attn_method(scale: Callable[[Any], float], heads_first: bool = True) -> Callable[[nn.Module], None]:
    replacement = _make_attn_method(scale, heads_first)

    def hook(module: Any) -> None:
        module._attn = types.MethodType(replacement, module)

    return hook


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


def _gaussian_topk(self: nn.Module, inputs: Tensor) -> Tensor:
    """Gemma 3n's activations above a quantile of a normal distribution; the original computes the quantile in each forward."""
    module: Any = self
    mean, std = torch.mean(inputs, dim=-1, keepdim=True), torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + std * module.torchweave_quantile))


def _hook_gemma3n_mlp(module: Any) -> None:
    if module.activation_sparsity > 0.0:
        quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(module.activation_sparsity))
        module.torchweave_quantile = float(quantile.to(module.gate_proj.weight.dtype))
        module._gaussian_topk = types.MethodType(_gaussian_topk, module)


_HOOKS_BY_CLASS: dict[str, Callable[[nn.Module], None]] = {
    "FalconAttention": _hook_falcon,
    "GPTJAttention": _hook_attn_method(lambda m: m.head_dim**-0.5),
    "CodeGenAttention": _hook_attn_method(lambda m: m.head_dim**-0.5),
    "GPTNeoSelfAttention": _hook_gpt_neo,
    "Gemma3nTextMLP": _hook_gemma3n_mlp,
    "Llama4TextDecoderLayer": _hook_llama4_layer,
    "PhimoeAttention": _hook_mask_window,
    "GPTNeoXJapaneseAttention": _hook_attn_method(lambda m: 1.0 / float(m.norm_factor)),
    **ATTENTION_HOOKS,
    **EXPERT_HOOKS,
    **POSITION_HOOKS,
}


def hook_attention(model: nn.Module) -> list[str]:
    """Install the ops where attention, experts or positions bypass transformers' interfaces; returns the hooked classes."""
    hooked = set()
    for module in model.modules():
        name = type(module).__name__
        if name in _HOOKS_BY_CLASS:
            _HOOKS_BY_CLASS[name](module)
            hooked.add(name)
    return sorted(hooked)


# -- length-dependent rotary embeddings --------------------------------------------------------------------------------


def _length_dependent_rope(model: nn.Module) -> Iterator[tuple[str, Any, dict[str | None, str]]]:
    """(name, module, kind by layer type) of rotary embeddings whose frequencies depend on the length."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        by_layer: dict[str | None, str] = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
        varying = {layer: kind for layer, kind in by_layer.items() if "dynamic" in kind or kind == "longrope"}
        if varying:
            yield name, module, varying


def _phimoe_rope_forward(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's cosines and sines, each `[1, T, D]`, with the frequencies chosen by `freeze_rope`.

    The original forward chooses the scale by the largest position of the batch and always uses the short factors; the model
    was published with long factors for the long scale.
    """
    module: Any = self
    angles = position_ids[..., None].float() * module.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


def _has_own_scaling(module: nn.Module) -> bool:
    """Whether the module has its own scales (`short_mscale`, `long_mscale`), which its forward selects by position."""
    return type(module).__name__ == "PhimoeRotaryEmbedding"


def disable_dynamic_rope(model: nn.Module) -> None:
    """Stop rotary embeddings from choosing frequencies in each forward; `freeze_rope` sets them."""
    for _, module, _ in _length_dependent_rope(model):
        frozen_forward = _phimoe_rope_forward if _has_own_scaling(module) else inspect.unwrap(type(module).forward)
        module.forward = types.MethodType(frozen_forward, module)


def freeze_rope(model: nn.Module, max_model_len: int, report: Report) -> None:
    """Fix the frequencies of dynamic-NTK and long RoPE for sequences of `max_model_len` tokens.

    transformers chooses them in each forward by the longest sequence of the batch: one request would change another's
    results, and cached and new keys would be rotated by different frequencies.
    """
    short = 0
    for name, module, varying in _length_dependent_rope(model):
        if module.config.rope_parameters.get("alpha"):
            continue  # HunYuan: type "dynamic" with frequencies fixed by alpha
        for layer, kind in varying.items():
            prefix = f"{layer}_" if layer is not None else ""
            extra = {"layer_type": layer} if layer is not None else {}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, torch.device("cpu"), seq_len=max_model_len, **extra
            )
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                short = max(short, parameters["original_max_position_embeddings"])
                if _has_own_scaling(module):
                    scaling = parameters["long_mscale" if max_model_len > short else "short_mscale"]
            getattr(module, f"{prefix}inv_freq").copy_(frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
        report.event("rope_frozen", module=name, kinds=sorted(set(varying.values())), max_model_len=max_model_len)
    if 0 < short < max_model_len:
        why = (
            f"prompts up to {short} tokens use the long factors, where transformers uses the short ones; set max_model_len to "
            f"at most {short} for the short factors"
        )
        report.event("warning", what="LongRoPE", why=why)


# -- padding warnings --------------------------------------------------------------------------------------------------


def disable_padding_warnings(model: nn.Module) -> None:
    """Disable the check for padding tokens, which reads tensors on the host; the engine does not pad."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _do_nothing  # type: ignore[method-assign]


def _do_nothing(*_: Any) -> None:
    pass
