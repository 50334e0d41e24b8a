"""Published model shapes without weights, for `load_format: dummy`."""

from __future__ import annotations

from typing import Any

_LLAMA_3: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "dtype": "bfloat16",
    "num_attention_heads": 32, "num_key_value_heads": 8,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_QWEN_3: dict[str, Any] = {
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16", "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
_QWEN3_8B: dict[str, Any] = _QWEN_3 | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 12288, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "shape:llama-1b": _LLAMA_3 | {
        "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True, "rope_parameters": _LLAMA_3["rope_parameters"] | {"factor": 32.0},
    },
    "shape:llama-3b": _LLAMA_3 | {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128, "intermediate_size": 8192,
        "tie_word_embeddings": True, "rope_parameters": _LLAMA_3["rope_parameters"] | {"factor": 32.0},
    },
    "shape:llama-8b": _LLAMA_3 | {
        "hidden_size": 4096, "num_hidden_layers": 32, "head_dim": 128, "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "shape:llama-70b": _LLAMA_3 | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128,
        "intermediate_size": 28672, "tie_word_embeddings": False,
    },
    "shape:qwen3-0.6b": _QWEN_3 | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "shape:qwen3-30b-a3b": _QWEN_3 | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "shape:gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": 2880, "num_hidden_layers": 24,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(24)],
        "sliding_window": 128, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
        "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "eos_token_id": 200002, "pad_token_id": 199999, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
    "shape:qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 248320,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "shape:falcon-h1-7b": {
        "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "vocab_size": 130048,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": 3072, "num_hidden_layers": 44, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
        "intermediate_size": 12288, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 128, "tie_word_embeddings": False,
    },
    "shape:granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100352,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": 1536, "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 512, "shared_intermediate_size": 1024,
        "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "position_embedding_type": "nope", "tie_word_embeddings": True,
    },
    "shape:lfm2-1.2b": {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "shape:qwen3-8b": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_QWEN3_8B},
    "shape:qwen3-vl-8b": {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "dtype": "bfloat16",
        "text_config": _QWEN3_8B | {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [24, 20, 20],
            },
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096},
        "tie_word_embeddings": False,
    },
    "shape:gemma-3-4b": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "vocab_size": 262208, "max_position_embeddings": 131072, "dtype": "bfloat16",
            "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "intermediate_size": 10240, "sliding_window": 1024,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
        },
    },
}  # fmt: skip
