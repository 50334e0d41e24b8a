"""Instance hooks for decoders that number the tokens of their input: they take the engine's positions instead.

The tokens of a step belong to many requests, so an index into the input is not a position.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithPast

from torchweave.models.attention import UnsupportedModel, attention_forward

# -- decoder halves of encoder-decoder models ---------------------------------------------------------------------------


def _make_decoder_forward(norm: str) -> Callable[..., BaseModelOutputWithPastAndCrossAttentions]:
    """The decoder of the BART family without cross-attention.

    Args:
        norm: where `layernorm_embedding` is: before or after positions are added (`words`, `sum`), or after the layers (`last`).
    """

    def forward(
        decoder: Any, input_ids: Tensor, position_ids: Tensor, **_: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        embedding_norm: Any = getattr(decoder, "layernorm_embedding", None)
        hidden = decoder.embed_tokens(input_ids)
        if hasattr(decoder, "embed_scale"):  # the other classes scale inside of the embedding
            hidden = hidden * decoder.embed_scale
        if norm == "words":
            hidden = embedding_norm(hidden)
        hidden = hidden + decoder.embed_positions(input_ids, 0, position_ids=position_ids[0])
        if norm == "sum" and embedding_norm is not None:
            hidden = embedding_norm(hidden)
        for layer in decoder.layers:
            outputs = layer(hidden, None, use_cache=False)
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if norm == "last" and embedding_norm is not None:
            hidden = embedding_norm(hidden)
        if getattr(decoder, "layer_norm", None) is not None:
            hidden = decoder.layer_norm(hidden)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    return forward


def _hook_decoder(norm: str) -> Callable[[Any], None]:
    replacement = _make_decoder_forward(norm)

    def hook(module: Any) -> None:
        name = type(module).__name__
        if getattr(module, "use_prompt", False):
            raise UnsupportedModel(
                f"{name} prepends learned prompts to its keys (use_prompt), which the engine does not support."
            )
        if not isinstance(module.embed_positions, nn.Embedding):
            raise UnsupportedModel(
                f"{name} has sinusoidal positions that skip padding tokens; only learned positions can be served."
            )
        for layer in module.layers:
            layer.self_attn.is_causal = True  # BigBirdPegasus declares causality in its mask only
        module.forward = types.MethodType(replacement, module)

    return hook


def _make_causal_lm_forward(head: str) -> Callable[..., CausalLMOutputWithPast]:
    """A `ForCausalLM` that passes positions on to its decoder; its own forward drops them."""

    def forward(
        module: Any, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **_: Any
    ) -> CausalLMOutputWithPast:
        hidden = module.model.decoder(input_ids=input_ids, position_ids=position_ids)[0]
        return CausalLMOutputWithPast(logits=getattr(module, head)(hidden[:, logits_to_keep]))

    return forward


# -- others ---------------------------------------------------------------------------------------------------------------


def _roformer_encoder_forward(
    encoder: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> BaseModelOutputWithPastAndCrossAttentions:
    """RoFormer's layers with the sines and cosines of the engine's positions, `[1, 1, T, D]`."""
    assert position_ids is not None, "the model passes positions"
    rotary = encoder.embed_positions(hidden_states.shape[:-1], 0, position_ids=position_ids[0])[None, None]
    for layer in encoder.layer:
        hidden_states = layer(hidden_states, attention_mask, rotary)[0]
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


def _ctrl_forward(
    model: Any, input_ids: Tensor, position_ids: Tensor, **_: Any
) -> BaseModelOutputWithPastAndCrossAttentions:
    """CTRL's layers; the original assigns its table of positions in every forward, which cannot be captured."""
    words = model.w(input_ids) * model.d_model_size**0.5
    hidden = words + model.pos_encoding.to(words.dtype)[position_ids]
    for layer in model.h:
        hidden = layer(hidden, attention_mask=None)
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=model.layernorm(hidden))


def _positions_after_padding_forward(module: Any, *args: Any, position_ids: Tensor, **given: Any) -> Tensor:
    """RoBERTa's embeddings, whose first position is the padding token's id + 1."""
    return type(module).forward(module, *args, position_ids=position_ids + module.padding_idx + 1, **given)


def _default_language_adapter(module: Any, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
    """X-MOD's adapter of the default language; the original selects tokens by language on the host."""
    normed = hidden_states
    if module.adapter_layer_norm is not None:
        normed = module.adapter_layer_norm(hidden_states)
    elif module.adapter_reuse_layer_norm:
        normed = module.LayerNorm(hidden_states)
    adapted = module.adapter_modules[module.torchweave_language](normed)
    return adapted + (normed if module.ln_before_adapter else hidden_states)


def _hook_xmod(module: Any) -> None:
    language = module.config.default_language
    if language not in module.encoder.layer[0].output.adapter_modules:
        raise UnsupportedModel(
            f"xmod has adapters by language and its config has default_language {language!r}; set it to one of its languages."
        )
    for layer in module.encoder.layer:
        layer.output.torchweave_language = language
        layer.output.lang_adapter = types.MethodType(_default_language_adapter, layer.output)


def _xglm_positions_forward(module: Any, position_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
    """XGLM's sinusoidal rows by position; the original enlarges its table by the length of the input."""
    return module.weights[position_ids + module.offset]


def _xlm_attention_forward(module: Any, hidden: Tensor, **_: Any) -> Tensor:
    """XLM's self-attention, `[1, T, K]` -> `[1, T, K]`."""
    query, key, value = (
        linear(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for linear in (module.q_lin, module.k_lin, module.v_lin)
    )
    out, _weights = attention_forward(module, query, key, value, None, scaling=module.head_dim**-0.5)
    return module.out_lin(out.flatten(2))


def _xlm_forward(
    model: Any, input_ids: Tensor, position_ids: Tensor, **_: Any
) -> BaseModelOutputWithPastAndCrossAttentions:
    """XLM's layers; the original counts tokens that are not padding and builds a mask."""
    hidden = model.layer_norm_emb(model.embeddings(input_ids) + model.position_embeddings(position_ids))
    layers = zip(model.attentions, model.layer_norm1, model.ffns, model.layer_norm2, strict=True)
    for attention, first_norm, feed_forward, second_norm in layers:
        hidden = first_norm(hidden + attention(hidden))
        hidden = second_norm(hidden + feed_forward(hidden))
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


def _hook_xlm(module: Any) -> None:
    if not module.causal:
        raise UnsupportedModel(
            "xlm attends to later tokens where its config has causal=False; only causal=True can be served."
        )
    if module.n_langs > 1 and module.use_lang_emb:
        raise UnsupportedModel(
            f"xlm adds an embedding of the language of each token (n_langs={module.n_langs}), which requests do not have; only "
            "n_langs=1 can be served."
        )
    if module.config.asm:
        raise UnsupportedModel(
            "xlm with asm=True has an adaptive softmax instead of logits; only asm=False can be served."
        )
    for index, each in enumerate(module.attentions):
        each.layer_idx, each.is_causal = index, True
        each.forward = types.MethodType(_xlm_attention_forward, each)
    module.forward = types.MethodType(_xlm_forward, module)


def is_position_hooked(module: nn.Module) -> bool:
    """Whether embeddings that number tokens by their ids have a hook."""
    return type(module).__name__ in _AFTER_PADDING


POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Model types whose table of positions has rows before the first position: as many as the padding token's id, and one."""

_AFTER_PADDING = (
    "CamembertEmbeddings",
    "Data2VecTextEmbeddings",
    "RobertaEmbeddings",
    "RobertaPreLayerNormEmbeddings",
    "XLMRobertaEmbeddings",
    "XLMRobertaXLEmbeddings",
    "XmodEmbeddings",
)

_BART_FAMILY = (
    "BartDecoder", "BlenderbotDecoder", "MBartDecoder", "MarianDecoder", "MvpDecoder", "PLBartDecoder", "PegasusDecoder",
    "TrOCRDecoder",
)  # fmt: skip

POSITION_HOOKS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(_BART_FAMILY, _hook_decoder("sum")),
    "BlenderbotSmallDecoder": _hook_decoder("words"),
    "BigBirdPegasusDecoder": _hook_decoder("last"),
    "XLMModel": _hook_xlm,
    "XmodModel": _hook_xmod,
}
"""Hooks by the name of the module's class."""

POSITION_FORWARD_OF: dict[str, Callable[..., Any]] = {
    "MvpForCausalLM": _make_causal_lm_forward("lm_head"),
    "TrOCRForCausalLM": _make_causal_lm_forward("output_projection"),
    "WhisperForCausalLM": _make_causal_lm_forward("proj_out"),
    "CTRLModel": _ctrl_forward,
    "RoFormerEncoder": _roformer_encoder_forward,
    "XGLMSinusoidalPositionalEmbedding": _xglm_positions_forward,
    **dict.fromkeys(_AFTER_PADDING, _positions_after_padding_forward),
}
"""Forwards that replace a module's, by the name of its class."""
