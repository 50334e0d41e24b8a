"""Tiny models of many architectures, built from configs, and their reference tokens from transformers.

Random weights make errors visible: a wrong mask, position, window or norm must change tokens, so matrices are larger than at
initialization, norms are not one, and biases are not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchweave.models.materialize import quiet_transformers
from torchweave.utils.suggest import did_you_mean

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


@dataclass(frozen=True)
class ZooModel:
    """One entry of the zoo.

    Attributes:
        name: name in `models verify`.
        model_type: transformers' name of the architecture.
        options: config values that override the common small sizes.
        shared: whether the common sizes apply; old architectures have other names for them.
        max_model_len: length for length-dependent RoPE; None: the config's limit.
    """

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    shared: bool = True
    max_model_len: int | None = None

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

ZOO_MODELS: tuple[ZooModel, ...] = (
    ZooModel("llama", "llama"),
    ZooModel("llama-tied", "llama", {"tie_word_embeddings": True}),
    ZooModel("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    ZooModel(
        "llama-rope-llama3",
        "llama",
        _rope(
            "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    ZooModel("llama-rope-linear", "llama", _rope("linear", factor=4.0)),
    ZooModel("llama-rope-yarn", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    ZooModel("llama-rope-dynamic", "llama", _rope("dynamic", factor=2.0)),
    ZooModel("qwen2", "qwen2"),
    ZooModel("qwen2-sliding", "qwen2", {"use_sliding_window": True, "max_window_layers": 1, **_SLIDING}),
    ZooModel("qwen3", "qwen3", {"head_dim": 32}),
    ZooModel("mistral", "mistral", _SLIDING),
    ZooModel("ministral", "ministral", {**_SLIDING, "head_dim": 16}),
    ZooModel("ministral3", "ministral3", {"head_dim": 16}),
    ZooModel("gemma", "gemma", {"head_dim": 32}),
    ZooModel(
        "gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 1.5, **_SLIDING},
    ),
    ZooModel(
        "gemma3", "gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6, **_SLIDING}
    ),
    ZooModel("vaultgemma", "vaultgemma", {"head_dim": 32, "query_pre_attn_scalar": 32, **_SLIDING}),
    ZooModel("phi", "phi"),
    ZooModel("phi3", "phi3"),
    ZooModel("phi3-sliding", "phi3", _SLIDING),
    ZooModel("phi3-longrope", "phi3", {**_LONG_ROPE, "original_max_position_embeddings": 128}, max_model_len=128),
    ZooModel("olmo", "olmo", {"clip_qkv": 8.0}),
    ZooModel("olmo2", "olmo2"),
    ZooModel("olmo3", "olmo3", {"num_hidden_layers": 4, **_SLIDING}),
    ZooModel("gpt_neox", "gpt_neox"),
    ZooModel("gpt_neox_japanese", "gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    ZooModel("gptj", "gptj", _GPT | {"rotary_dim": 8}, shared=False),
    ZooModel("codegen", "codegen", _GPT | {"n_embd": 128, "n_head": 16, "rotary_dim": 8, "n_ctx": 512}, shared=False),
    ZooModel("gpt2", "gpt2", _GPT, shared=False),
    ZooModel("gpt2-pad-token", "gpt2", _GPT | {"pad_token_id": 0}, shared=False),
    ZooModel("gpt_bigcode", "gpt_bigcode", _GPT, shared=False),
    ZooModel(
        "gpt_neo",
        "gpt_neo",
        _OLD
        | {"hidden_size": _WIDTH, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 512, "window_size": 16}
        | {"attention_types": [[["global", "local"], 2]], "intermediate_size": 96},
        shared=False,
    ),
    ZooModel("opt", "opt", {"ffn_dim": 96, "word_embed_proj_dim": _WIDTH}),
    ZooModel("opt-post-norm", "opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ZooModel("biogpt", "biogpt"),
    ZooModel("falcon", "falcon", {"alibi": False, "multi_query": True, "new_decoder_architecture": False}),
    ZooModel(
        "falcon-new",
        "falcon",
        {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "parallel_attn": True},
    ),
    ZooModel("starcoder2", "starcoder2", {**_SLIDING, "use_bias": True}),
    ZooModel("stablelm", "stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    ZooModel("persimmon", "persimmon"),
    ZooModel("cohere", "cohere", {"use_qk_norm": True}),
    ZooModel("cohere2", "cohere2", {"num_hidden_layers": 4, **_SLIDING}),
    ZooModel(
        "granite",
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    ZooModel("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    ZooModel("glm", "glm", {"head_dim": 16}),
    ZooModel("glm4", "glm4", {"head_dim": 16}),
    ZooModel("nemotron", "nemotron"),
    ZooModel("ernie4_5", "ernie4_5", {"head_dim": 16}),
    ZooModel("exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window_pattern": 4, **_SLIDING}),
    ZooModel("helium", "helium", {"head_dim": 16}),
    ZooModel("seed_oss", "seed_oss", {"head_dim": 16}),
    ZooModel("arcee", "arcee"),
    ZooModel("apertus", "apertus"),
    ZooModel("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": 16}),
    ZooModel("jais2", "jais2"),
    ZooModel("cwm", "cwm", {"head_dim": 16, "num_hidden_layers": 4, **_SLIDING}),
    ZooModel("hyperclovax", "hyperclovax", {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    ZooModel("nanochat", "nanochat"),
    ZooModel("granite_swa", "granite_swa", {"num_hidden_layers": 4, **_SLIDING}),
    ZooModel("youtu", "youtu", _LATENT),
    ZooModel("minicpm3", "minicpm3", _LATENT),
    ZooModel("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ZooModel("qwen2_moe", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 48}),
    ZooModel("qwen3_moe", "qwen3_moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    ZooModel("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    ZooModel("flex_olmo", "flex_olmo", {"num_experts": 8, "num_experts_per_tok": 2}),
    ZooModel("phimoe", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING}),
    ZooModel("granitemoe", "granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    ZooModel(
        "granitemoeshared",
        "granitemoeshared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    ZooModel(
        "gpt_oss",
        "gpt_oss",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, **_SLIDING}
        | _rope(
            "yarn",
            1.5e5,
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=64,
        ),
    ),
    ZooModel(
        "deepseek_v2",
        "deepseek_v2",
        _LATENT | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "head_dim": 16},
    ),
    ZooModel("deepseek_v3", "deepseek_v3", _LATENT | {"n_group": 2, "topk_group": 1}),
    ZooModel("glm4_moe_lite", "glm4_moe_lite", _LATENT | {"n_group": 1, "topk_group": 1}),
    ZooModel(
        "glm4_moe",
        "glm4_moe",
        {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    ZooModel(
        "llama4",
        "llama4_text",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        | {"attention_chunk_size": 32, "num_hidden_layers": 4, "floor_scale": 16, "attn_scale": 0.5},
    ),
    ZooModel("ernie4_5_moe", "ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}),
    ZooModel(
        "dots1",
        "dots1",
        {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    ZooModel(
        "hunyuan_v1_moe",
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    ),
    ZooModel("minimax_m2", "minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    ZooModel(
        "solar_open",
        "solar_open",
        {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    ZooModel("bitnet", "bitnet"),
    ZooModel("afmoe", "afmoe", {"head_dim": 16, **_EXPERTS, "num_hidden_layers": 4, "num_dense_layers": 1, **_SLIDING}),
    ZooModel("exaone_moe", "exaone_moe", {**_EXPERTS, "num_hidden_layers": 4, **_SLIDING}),
    ZooModel(
        "mimo_v2_flash",
        "mimo_v2_flash",
        {
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_head_dim": 24,
            "swa_v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            **_SLIDING,
        },
    ),
)

REFUSED_MODELS: tuple[ZooModel, ...] = (
    ZooModel("diffllama", "diffllama"),
    ZooModel("doge", "doge"),
    ZooModel("jetmoe", "jetmoe"),
    ZooModel("lfm2", "lfm2", {"full_attn_idxs": [1]}),
    ZooModel("qwen3_next", "qwen3_next", {**_EXPERTS}),
    ZooModel("falcon_h1", "falcon_h1"),
    ZooModel("bloom", "bloom", _OLD | {"hidden_size": 64, "n_head": 4, "n_layer": 3}, shared=False),
    ZooModel("mpt", "mpt", _OLD | {"d_model": 64, "n_heads": 4, "n_layers": 3}, shared=False),
    ZooModel(
        "dbrx",
        "dbrx",
        _OLD
        | {"d_model": _WIDTH, "n_heads": 4, "n_layers": 3, "max_seq_len": 512}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}
        | {"ffn_config": {"hidden_size": _WIDTH, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
        shared=False,
    ),
    ZooModel(
        "longcat_flash",
        "longcat_flash",
        _LATENT
        | {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2}
        | {"n_routed_experts": 8, "zero_expert_num": 2, "head_dim": 16},
    ),
)
"""Architectures rejected at load, each for another reason."""


def zoo_model(name: str) -> ZooModel:
    """The model called `name`; ValueError suggests the nearest name."""
    for entry in (*ZOO_MODELS, *REFUSED_MODELS):
        if entry.name == name:
            return entry
    names = (entry.name for entry in ZOO_MODELS)
    hint = did_you_mean(name, names, "`torchweave models list` shows those that are known")
    raise ValueError(f"Unknown architecture {name!r}; {hint}")


def transformers_version() -> str:
    """Version of transformers."""
    return transformers.__version__


def build(entry: ZooModel, seed: int = 0) -> PreTrainedModel:
    """transformers' eager float32 model of an entry, with weights that make errors visible."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(entry.config(), dtype=torch.float32, attn_implementation="eager")
        perturb_weights(model)
    return model.eval().requires_grad_(False)


def save(model: PreTrainedModel, folder: str | Path) -> None:
    """Save a model to a folder."""
    with quiet_transformers():
        model.save_pretrained(folder)


@torch.no_grad()
def perturb_weights(model: nn.Module) -> None:
    """Scale initial weights away from values under which layers have almost no effect."""
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if parameter.ndim >= 2:
            # About 1.2 / sqrt(fan in) at these widths: peaked attention, and outputs as large as the residual.
            parameter.normal_(0.0, 0.15)
        elif leaf == "weight":
            parameter.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.1)


@torch.no_grad()
def reference_tokens(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of transformers' eager model, one prompt at a time, without a cache or stop tokens."""
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(num_tokens):
            logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers
