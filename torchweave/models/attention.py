"""The attention function that transformers' models call after `adapt` has set its name in their config.

It reshapes Hugging Face's `[1, heads, tokens, head_dim]` to the flat `[tokens, heads, head_dim]` of `torchweave::attention` and
converts the layer's settings (window, soft cap, sinks, chunk) to arguments of the op. Only the op's integer `layer` identifies
the layer in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

import torchweave.ops.attention.op
import torchweave.ops.attention.sparse  # noqa: F401  (both define ops)

NAME = "torchweave"
"""The implementation's name in transformers. No mask function is registered under it, so models build no masks."""

# Arguments without effect on the inference result of a causal decoder.
_IGNORED_ARGUMENTS = frozenset(
    {
        "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "output_router_logits", "logits_to_keep", "return_dict", "num_items_in_batch", "position_embeddings",
        "position_embeddings_local", "deterministic", "layer_type", "past_key_values", "head_mask", "token_type_ids",
    }
)  # fmt: skip


class UnsupportedModel(ValueError):
    """The model needs a feature that the engine lacks; the message names it."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    token_positions: Tensor | None = None,
    layer_offset: int = 0,
    alibi_slopes: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention over flattened tokens: query `[1, H, T, D]`, key `[1, KH, T, D]`, value `[1, KH, T, Dv]` -> `[1, T, H, Dv]`.

    Raises:
        UnsupportedModel: the model passes its own mask, is bidirectional, or passes an argument of unknown effect.
    """
    indices = block_indices if indices is None else indices
    _check(module, attention_mask if indices is None else None, extra)
    temperature = getattr(module, "torchweave_temperature", None)
    if temperature is not None:
        assert token_positions is not None, "the layer hook passes positions"
        query = _scale_query_by_position(query, token_positions, *temperature)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = torch.empty(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    if indices is not None:
        torch.ops.torchweave.sparse_attention(q, k, v, indices[0], out, layer_number(module), scale, s_aux)
        return out.unsqueeze(0), None
    window, chunk = _window_and_chunk(module, sliding_window)
    layer = layer_number(module) + layer_offset
    alibi = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}
    torch.ops.torchweave.attention(q, k, v, out, layer, scale, window, float(softcap or 0.0), s_aux, chunk, **alibi)
    return out.unsqueeze(0), None


def layer_number(module: nn.Module) -> int:
    """Index of an attention module's keys and values among the attention layers of this rank."""
    return int(getattr(module, "torchweave_layer", module.layer_idx))  # type: ignore[arg-type]


def _scale_query_by_position(query: Tensor, positions: Tensor, strength: float, floor: float) -> Tensor:
    """Llama 4's temperature by position: query `[1, H, T, D]`, positions `[1, T]` (arXiv 2501.19399)."""
    scale = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * strength + 1.0
    return (query * scale[:, None, :, None]).to(query.dtype)


def _check(module: nn.Module, attention_mask: Tensor | None, extra: dict[str, Any]) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModel(
            f"{name} builds its own attention mask; the engine supports causal, windowed and chunked attention only."
        )
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal; only causal decoders can be served.")
    unknown = sorted(key for key, given in extra.items() if given is not None and key not in _IGNORED_ARGUMENTS)
    if unknown:
        raise UnsupportedModel(
            f"{name} passes {', '.join(unknown)} to its attention, which the engine does not support."
        )


def _window_and_chunk(module: Any, sliding_window: int | None) -> tuple[int, int]:
    """(window, chunk) of this layer in tokens, 0 = none; `config.layer_types` overrides the argument, as in transformers' masks."""
    config: Any = getattr(module, "config", None)
    layer: int = module.layer_idx
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer >= len(kinds):
        return int(sliding_window or getattr(module, "torchweave_window", 0)), 0
    kind = kinds[layer]
    if kind in ("full_attention", "attention", "hybrid"):
        return 0, 0
    if kind == "chunked_attention":
        return 0, int(config.attention_chunk_size)
    window = sliding_window or getattr(config, "sliding_window", None)
    if kind not in ("sliding_attention", "hybrid_sliding") or not window:
        raise UnsupportedModel(
            f"layer {layer} of {type(module).__name__} has type {kind}, which the engine does not support."
        )
    return int(window), 0


AttentionInterface.register(NAME, attention_forward)
