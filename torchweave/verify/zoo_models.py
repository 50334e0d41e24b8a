"""Tiny configurations of many architectures: those that are served, and those that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

VOCAB = 256
_WIDTH = 64
_BASE: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": _ROPE,
}


_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_KIMI = {key: value for key, value in _LATENT.items() if key not in ("q_lora_rank", "rope_parameters")} | {
    "num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}


@dataclass(frozen=True)
class ZooModel:
    """One entry of the zoo.

    Attributes:
        name: name in `models verify`.
        options: config values that override the common small sizes.
        base: transformers' name of the architecture; empty: `name`.
        shared: whether the common sizes apply; old architectures have other names for them.
        max_model_len: length for length-dependent RoPE; None: the config's limit.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    shared: bool = True
    max_model_len: int | None = None

    @property
    def model_type(self) -> str:
        return self.base or self.name

    def config(self) -> Any:
        """Build a config object."""
        return AutoConfig.for_model(self.model_type, **((_BASE if self.shared else {}) | self.options))


def _rope(kind: str, theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


_LONG_ROPE = _rope(
    "longrope", short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + 0.2 * i for i in range(8)],
    original_max_position_embeddings=128, factor=4.0,
)  # fmt: skip
_SLIDING = {"sliding_window": 16}
_OLD = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
_GPT = _OLD | {"n_embd": _WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 512}
_XGLM = _OLD | {
    "d_model": _WIDTH, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 16,
}
# Decoder halves of encoder-decoder models, and encoders that are configured as decoders.
_BART = _OLD | {
    "d_model": _WIDTH, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_position_embeddings": 512,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "pad_token_id": 0, "decoder_start_token_id": 1,
    "is_decoder": True, "is_encoder_decoder": False, "tie_word_embeddings": False, "scale_embedding": True,
}  # fmt: skip
_BERT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "add_cross_attention": False,
}

_HEAD = {"head_dim": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 32}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_COMPASS_ROPE = {"sliding_attention": {**_ROPE, "mrope_section": [3, 3, 2]}, "full_attention": None}
_LANGUAGES = {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}
_LLAMA4: dict[str, Any] = {
    "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 32,
    "num_hidden_layers": 4, "floor_scale": 16, "attn_scale": 0.5,
}  # fmt: skip
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_GEMMA4: dict[str, Any] = _HEAD | _SLIDING | _MIXED | _PER_LAYER | {"global_head_dim": 32}
_GEMMA4_UNIFIED: dict[str, Any] = _HEAD | _SLIDING | _MIXED | {"global_head_dim": 32}
_GEMMA3N = _HEAD | _SLIDING | _PER_LAYER | _FOUR_LAYERS | {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1, "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": [96] * 4,
}  # fmt: skip
_INDEXED: dict[str, Any] = _LATENT | _HEAD | {
    "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk": 8, "index_head_dim": 24, "index_n_heads": 8,
}  # fmt: skip
_DOTS3: dict[str, Any] = {key: value for key, value in _INDEXED.items() if key not in ("rope_parameters", "head_dim")} | {
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "n_group": 2, **_SLIDING,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 48, "swa_kv_lora_rank": 16,
    "swa_head_dim": 40, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 16,
    "shared_experts_intermediate_size": 32,
    "index_n_heads": 16,  # with 8 the scores of two keys are 0, and either may be selected
}  # fmt: skip
_DEEPSEEK_V4: dict[str, Any] = _HEAD | {
    "layer_types": ["sliding_attention"] * 3, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "num_key_value_heads": 1,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "qk_rope_head_dim": 8,
}  # fmt: skip
_INKLING: dict[str, Any] = _HEAD | {
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "sliding_window_size": 16, "rel_extent": 24, "d_rel": 4,
    "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": _WIDTH}
_AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}


def _text(options: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Options of a model of several modalities: of its text part, and configs of the others."""
    return {"text_config": _BASE | options, **others}


MODELS: tuple[ZooModel, ...] = (
    ZooModel("llama"),
    ZooModel("llama-tied", {"tie_word_embeddings": True}, base="llama"),
    ZooModel("llama-bias", {"attention_bias": True, "mlp_bias": True}, base="llama"),
    ZooModel(
        "llama-rope-llama3",
        _rope(
            "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
        base="llama",
    ),
    ZooModel("llama-rope-linear", _rope("linear", factor=4.0), base="llama"),
    ZooModel("llama-rope-yarn", _rope("yarn", factor=4.0, original_max_position_embeddings=128), base="llama"),
    ZooModel("llama-rope-dynamic", _rope("dynamic", factor=2.0), base="llama"),
    ZooModel("qwen2"),
    ZooModel("qwen2-sliding", {"use_sliding_window": True, "max_window_layers": 1, **_SLIDING}, base="qwen2"),
    ZooModel("qwen3", {"head_dim": 32}),
    ZooModel("mistral", _SLIDING),
    ZooModel("ministral", {**_SLIDING, "head_dim": 16}),
    ZooModel("ministral3", {"head_dim": 16}),
    ZooModel("gemma", {"head_dim": 32}),
    ZooModel("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 1.5, **_SLIDING}),
    ZooModel("gemma3", {
        "head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6, **_SLIDING,
    }, base="gemma3_text"),
    ZooModel("vaultgemma", {"head_dim": 32, "query_pre_attn_scalar": 32, **_SLIDING}),
    ZooModel("phi"),
    ZooModel("phi3"),
    ZooModel("phi3-sliding", _SLIDING, base="phi3"),
    ZooModel("phi3-longrope", {**_LONG_ROPE, "original_max_position_embeddings": 128}, base="phi3", max_model_len=128),
    ZooModel("olmo", {"clip_qkv": 8.0}),
    ZooModel("olmo2"),
    ZooModel("olmo3", {"num_hidden_layers": 4, **_SLIDING}),
    ZooModel("gpt_neox"),
    ZooModel("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    ZooModel("gptj", _GPT | {"rotary_dim": 8}, shared=False),
    ZooModel("codegen", _GPT | {"n_embd": 128, "n_head": 16, "rotary_dim": 8, "n_ctx": 512}, shared=False),
    ZooModel("gpt2", _GPT, shared=False),
    ZooModel("gpt2-pad-token", _GPT | {"pad_token_id": 0}, base="gpt2", shared=False),
    ZooModel("gpt_bigcode", _GPT, shared=False),
    ZooModel("gpt_neo", _OLD | {
        "hidden_size": _WIDTH, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 512, "window_size": 16,
        "attention_types": [[["global", "local"], 2]], "intermediate_size": 96,
    }, shared=False),
    ZooModel("opt", {"ffn_dim": 96, "word_embed_proj_dim": _WIDTH}),
    ZooModel("opt-post-norm", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}, base="opt"),
    ZooModel("biogpt"),
    ZooModel("falcon", {"alibi": False, "multi_query": True, "new_decoder_architecture": False}),
    ZooModel("falcon-new", {
        "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "parallel_attn": True,
    }, base="falcon"),
    ZooModel("starcoder2", {**_SLIDING, "use_bias": True}),
    ZooModel("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    ZooModel("persimmon"),
    ZooModel("cohere", {"use_qk_norm": True}),
    ZooModel("cohere2", {"num_hidden_layers": 4, **_SLIDING}),
    ZooModel("granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    }),
    ZooModel("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    ZooModel("glm", {"head_dim": 16}),
    ZooModel("glm4", {"head_dim": 16}),
    ZooModel("nemotron"),
    ZooModel("ernie4_5", {"head_dim": 16}),
    ZooModel("exaone4", {"num_hidden_layers": 4, "sliding_window_pattern": 4, **_SLIDING}),
    ZooModel("helium", {"head_dim": 16}),
    ZooModel("seed_oss", {"head_dim": 16}),
    ZooModel("arcee"),
    ZooModel("apertus"),
    ZooModel("hunyuan_v1_dense", {"head_dim": 16}),
    ZooModel("jais2"),
    ZooModel("cwm", {"head_dim": 16, "num_hidden_layers": 4, **_SLIDING}),
    ZooModel("hyperclovax", {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    ZooModel("nanochat"),
    ZooModel("granite_swa", {"num_hidden_layers": 4, **_SLIDING}),
    ZooModel("youtu", _LATENT),
    ZooModel("minicpm3", _LATENT),
    ZooModel("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ZooModel("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 48}),
    ZooModel("qwen3_moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    ZooModel("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    ZooModel("flex_olmo", {"num_experts": 8, "num_experts_per_tok": 2}),
    ZooModel("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING}),
    ZooModel("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    ZooModel("granitemoeshared", {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}),
    ZooModel("gpt_oss", {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, **_SLIDING,
    } | _rope("yarn", 1.5e5, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64)),
    ZooModel(
        "deepseek_v2", _LATENT | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "head_dim": 16}
    ),
    ZooModel("deepseek_v3", _LATENT | {"n_group": 2, "topk_group": 1}),
    ZooModel("glm4_moe_lite", _LATENT | {"n_group": 1, "topk_group": 1}),
    ZooModel("glm4_moe", {
        "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
    }),
    ZooModel("llama4", _LLAMA4, base="llama4_text"),
    ZooModel("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}),
    ZooModel("dots1", {
        "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }),
    ZooModel("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    ZooModel("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    ZooModel("solar_open", {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ZooModel("bitnet"),
    ZooModel("afmoe", {"head_dim": 16, **_EXPERTS, "num_hidden_layers": 4, "num_dense_layers": 1, **_SLIDING}),
    ZooModel("exaone_moe", {**_EXPERTS, "num_hidden_layers": 4, **_SLIDING}),
    ZooModel("mimo_v2_flash", {
        "head_dim": 24, "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, **_SLIDING,
    }),
    # Layers with a recurrent state.
    ZooModel("qwen3_next", _FOUR_LAYERS | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    ZooModel("qwen3_5", _FOUR_LAYERS | _DELTA, base="qwen3_5_text"),
    ZooModel("qwen3_5_moe", _FOUR_LAYERS | _DELTA | _EXPERTS | {
        "shared_expert_intermediate_size": 32,
    }, base="qwen3_5_moe_text"),
    ZooModel("olmo_hybrid", _FOUR_LAYERS | _DELTA | {"linear_num_key_heads": 4}),
    ZooModel("kimi_linear", _KIMI | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    ZooModel("bailing_hybrid", _FOUR_LAYERS | _KIMI | {"num_expert_group": 2, "layer_group_size": 2}),
    ZooModel("minimax", _FOUR_LAYERS | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ZooModel("recurrent_gemma", {"num_hidden_layers": 6, "head_dim": 16, "lru_width": _WIDTH, "attention_window_size": 16}),
    ZooModel("mamba", {"state_size": 8}),
    ZooModel("falcon_mamba", {"state_size": 8}),
    ZooModel("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}),
    ZooModel(
        "falcon_h1",
        _MAMBA2
        | {
            "mamba_d_ssm": 128,
            "head_dim": 16,
            "embedding_multiplier": 5.7,
            "lm_head_multiplier": 0.3,
            "key_multiplier": 0.4,
        }
        | {
            "mlp_multipliers": [0.9, 0.6],
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.8,
        }
        | {"ssm_multipliers": [0.8, 0.7, 0.6, 0.5, 0.9]},
    ),
    ZooModel("bamba", _FOUR_LAYERS | _MAMBA2 | {"attn_layer_indices": [1]}),
    ZooModel("granitemoehybrid", _FOUR_LAYERS | _MAMBA2 | {
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }),
    ZooModel("nemotron_h", {
        "hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
    }),
    ZooModel("zamba2", {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16,
        "mamba_headdim": 16, "n_mamba_heads": 8, "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 8,
    }),
    ZooModel("jamba", _FOUR_LAYERS | {
        "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "expert_layer_period": 2,
    }),
    ZooModel("lfm2", _FOUR_LAYERS | {"full_attn_idxs": [1], "block_multiple_of": 32}),
    ZooModel("lfm2_moe", _FOUR_LAYERS | _EXPERTS | {
        "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1,
    }),
    ZooModel("lfm3", _FOUR_LAYERS),
    ZooModel("bloom", _OLD | {"hidden_size": 96, "n_head": 6, "n_layer": 3}, shared=False),
    ZooModel("mpt", _OLD | {"d_model": 96, "n_heads": 6, "n_layers": 3, "max_seq_len": 512}, shared=False),
    ZooModel("dbrx", _OLD | {
        "d_model": _WIDTH, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "rope_parameters": _ROPE,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": _WIDTH, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    }, shared=False),
    ZooModel("jetmoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE}),
    ZooModel("longcat_flash", _LATENT | {
        "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2,
        "n_routed_experts": 8, "zero_expert_num": 2, "head_dim": 16,
    }),
    ZooModel("emu3", {"text_config": _BASE}, shared=False),
    ZooModel("mllama", {
        "text_config": _BASE | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "rope_parameters": _ROPE},
    }, shared=False),
    ZooModel("diffllama"),
    ZooModel("doge"),
    ZooModel("hrm_text", {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 12}),
    ZooModel("ctrl", _GPT | {"dff": 96}, shared=False),
    ZooModel("openai-gpt", _GPT, shared=False),
    ZooModel("xglm", _XGLM, shared=False),
    ZooModel("rwkv", {"rescale_every": 0}),  # transformers divides weights in its first forward
    ZooModel("xlm", _OLD | {"pad_token_id": 0, "emb_dim": 64, "n_heads": 4, "n_layers": 3, "causal": True}, shared=False),
    ZooModel("git", {"num_key_value_heads": 4, "vision_config": _VISION}),
    *(
        ZooModel(name, _BART, shared=False)
        for name in (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "pegasus",
            "plbart",
            "mvp",
        )
    ),
    ZooModel("trocr", _BART | {"use_learned_position_embeddings": True}, shared=False),
    ZooModel("whisper", _BART | {"max_target_positions": 512}, shared=False),
    *(ZooModel(name, _BERT) for name in ("bert", "bert-generation", "ernie", "megatron-bert", "rembert", "roformer")),
    ZooModel("roformer-rotary-value", _BERT | {"rotary_value": True}, base="roformer"),
    ZooModel("electra", _BERT | {"embedding_size": 32}),
    ZooModel("roc_bert", _BERT | {"enable_pronunciation": False, "enable_shape": False}),
    ZooModel("big_bird", _BERT | {"attention_type": "original_full"}),
    # Positions after the padding token's id.
    *(
        ZooModel(name, _BERT | {"pad_token_id": 1, "bos_token_id": 0})
        for name in ("roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
    ),
    ZooModel("xmod", _BERT | {"pad_token_id": 1, "bos_token_id": 0, **_LANGUAGES}),
    ZooModel("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 32}),
    ZooModel("axk1", _LATENT | {"n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"], **_HEAD}),
    ZooModel("beam", _SLIDING),
    ZooModel("cohere2_moe", _FOUR_LAYERS | _EXPERTS | _SLIDING | {"first_k_dense_replace": 1}),
    ZooModel("cohere_compass_text", _SLIDING | _HEAD | _MIXED | {"rope_parameters": _COMPASS_ROPE}),
    ZooModel("flint", _FOUR_LAYERS | _EXPERTS | _SLIDING | _SHARED | {"mlp_only_layers": [0], **_HEAD}),
    ZooModel("granitemoe_swa", _FOUR_LAYERS | _SLIDING | _LOCAL),
    ZooModel("hy_v3", _EXPERTS | _HEAD),
    ZooModel("internlm3"),
    ZooModel("iquestcoder"),
    ZooModel("gpt-sw3", _GPT, shared=False),
    ZooModel("kolibri1", _SLIDING | _LOCAL | _SHARED | _MIXED | {"moe_intermediate_size": 32, **_HEAD}),
    ZooModel("mellum", _SLIDING | _LOCAL | _MIXED | {
        "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse"],
    }),
    ZooModel("laguna", _EXPERTS | _SLIDING | _HEAD),
    ZooModel("modernbert-decoder", _MIXED | {"local_attention": 32}),
    ZooModel("moshi", {"ffn_dim": 96, "num_key_value_heads": 4, "audio_encoder_config": {}, **_HEAD, **_SLIDING}),
    ZooModel("gemma3n_text", _GEMMA3N),
    ZooModel("gemma4_text", _GEMMA4 | {"attention_k_eq_v": True, "final_logit_softcapping": 2.0}),
    ZooModel("gemma4-moe", _GEMMA4 | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }, base="gemma4_text"),
    ZooModel("gemma4_unified_text", _GEMMA4_UNIFIED),
    # Keys selected by an indexer, fewer than a prompt has. Eight heads make ties of scores, all of them 0, unlikely.
    ZooModel("deepseek_v32", _INDEXED | {"n_group": 2}),
    ZooModel("axk2", _INDEXED | {"n_group": 2}),
    ZooModel("glm_moe_dsa", _INDEXED | {"n_group": 2, "indexer_types": ["full", "shared", "full"]}),
    ZooModel("hy_v4", _INDEXED | {"n_group": 1, "indexer_types": ["full", "shared", "full"], "hc_mult": 2}),
    ZooModel("dots3_note_text", _DOTS3),
    ZooModel("minimax_m3_vl_text", _LOCAL | {
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "rotary_dim": 8, "index_head_dim": 16, **_HEAD,
        "index_block_size": 4, "index_topk_blocks": 3, "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    }),
    ZooModel(
        "dots3_note",
        _text(
            _DOTS3,
            vision_config=_VISION | {"mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": _WIDTH},
            audio_config=_VISION
            | {"num_key_value_heads": 2, "downsample_hidden_size": 8, "head_dim": 16}
            | {"adapter_input_size": 32, "adapter_out_dim": _WIDTH, "conv_output_size": 128},
        ),
        shared=False,
    ),
    ZooModel("zaya", {"num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16, **_HEAD}),
    ZooModel("zaya-sliding", {
        "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16, "attention_bias": True, **_HEAD,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2, "cca_time0": 3, "cca_time1": 3, **_FOUR_LAYERS, **_SLIDING,
    }, base="zaya"),
    ZooModel("zamba", _FOUR_LAYERS | {
        "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 2 * _WIDTH, "attention_head_dim": 32,
        "num_key_value_heads": 4, "mamba_dt_rank": 8, "mamba_d_state": 8,
    }),
    ZooModel("inkling_text", _INKLING | {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_shared_experts": 1}),
    ZooModel("inkling2_text", _INKLING | {
        "vocab_size": VOCAB + 8, "unpadded_vocab_size": VOCAB, "log_scaling_n_floor": 16, "n_layers_per_attn_res_block": 2,
    }),
    ZooModel("deepseek_v4-sliding", _DEEPSEEK_V4 | _SLIDING, base="deepseek_v4"),
    # The text parts of models of several modalities.
    ZooModel("fuyu", {"text_config": _BASE, "image_size": 32, "patch_size": 16}, shared=False),
    ZooModel("gemma3-multimodal", _text(_SLIDING | _HEAD, vision_config=_VISION), base="gemma3", shared=False),
    ZooModel("gemma4", _text(_GEMMA4), shared=False),
    ZooModel("gemma4_unified", _text(_GEMMA4_UNIFIED), shared=False),
    ZooModel("got_ocr2", _text({}, vision_config=_VISION | {"mlp_dim": 32, "output_channels": 16}), shared=False),
    ZooModel("llama4-multimodal", _text(_LLAMA4, vision_config=_VISION | {
        "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }), base="llama4", shared=False),
    ZooModel("moss_transcribe_diarize", _text(_HEAD, audio_config=_AUDIO), shared=False),
    ZooModel(
        "phi4_multimodal",
        {
            "vision_config": _VISION,
            "audio_config": {"hidden_size": 32, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 32}
            | {"ext_pw_out_channel": 32, "nemo_conv_channels": 32},
        },
    ),
    ZooModel("qwen3_5-multimodal", _text(_FOUR_LAYERS | _DELTA, vision_config=_QWEN_VISION), base="qwen3_5", shared=False),
    ZooModel(
        "qwen3_5_moe-multimodal",
        _text(_FOUR_LAYERS | _DELTA | _EXPERTS | _SHARED, vision_config=_QWEN_VISION),
        base="qwen3_5_moe",
        shared=False,
    ),
)  # fmt: skip
"""Architectures that the engine serves, in some version of transformers."""

REFUSED_MODELS: tuple[ZooModel, ...] = (
    ZooModel("falcon-alibi", {"alibi": True}, base="falcon"),
    ZooModel("doge-moe", {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, base="doge"),
    ZooModel("xmod-language", _BERT | _LANGUAGES | {"default_language": None}, base="xmod"),
    ZooModel("cpmant"),
    ZooModel("musicgen", shared=False),
    ZooModel("xlm-encoder", _OLD | {"emb_dim": 64, "n_heads": 4, "n_layers": 2}, base="xlm", shared=False),
    ZooModel("deepseek_v4", _DEEPSEEK_V4 | {"layer_types": None}),
    ZooModel("big_bird-sparse", _BERT, base="big_bird"),
)  # fmt: skip
"""Architectures rejected at load, each for another reason."""
