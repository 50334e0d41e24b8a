"""Tensor-parallel roles of linears: sharded by columns, by rows, or replicated.

transformers' plan of the model (`base_model_tp_plan` of the config, `_tp_plan` of the class) takes precedence. Many models have
none, or one without attention; for architectures verified against transformers on several ranks (`VERIFIED`), common module
names fill the gaps. Otherwise linears outside the plan are replicated, and a model with a replicated attention is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from torchweave.models.hooks.recurrent import is_recurrent
from torchweave.models.multimodal.support import decoder_name, text_config

Role = Literal["columns", "rows"]

# transformers' styles (5.17 to 5.23) that shard a linear.
_STYLES: Mapping[str, Role] = {
    "colwise": "columns",
    "packed_colwise": "columns",
    "local_colwise": "columns",
    "local_packed_colwise": "columns",
    "rowwise": "rows",
    "packed_rowwise": "rows",
    "local_rowwise": "rows",
    "local_packed_rowwise": "rows",
}
# Styles that gather columns and split rows around a module that the plan cannot shard (a fused projection, a norm over all
# heads); verified architectures can.
_GATHERED: Mapping[str, Role] = {
    "colwise_rep": "columns",
    "colwise_gather_output": "columns",
    "rowwise_rep": "rows",
    "rowwise_split_input": "rows",
}
VERIFIED = frozenset(
    {
        "afmoe", "apertus", "arcee", "bailing_hybrid", "bamba", "biogpt", "bitnet", "codegen", "cohere", "cohere2", "cwm",
        "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1",
        "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode",
        "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe",
        "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2",
        "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3",
        "olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "qwen3_vl_text", "recurrent_gemma", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
    }
)  # fmt: skip
"""Architectures (`model_type`) whose tokens equal transformers' on 2 ranks, many also on 4: docs/reference/models.md."""
_COLUMNS = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value", "c_attn", "g_proj",
        "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "fc_in", "dense_h_to_4h", "input_linear", "w1", "w3",
    }
)  # fmt: skip
_ROWS = frozenset(
    {"o_proj", "out_proj", "dense", "c_proj", "down_proj", "fc2", "fc_out", "dense_4h_to_h", "output_linear", "w2"}
)
KV = frozenset({"k_proj", "v_proj"})
"""Linears of keys and values."""
PACKED = frozenset({"gate_up_proj", "input_linear"})
"""Linears whose columns are gate, then up."""
ATTENTION = frozenset({"q_proj", "q_b_proj", "qkv_proj", "query_key_value", "c_attn"})
"""Projections that identify an attention module."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def name_pattern(name: str) -> str:
    """The name with a star for each number, as in plans and reports."""
    return _NUMBER.sub(".*", name)


def transformers_tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """transformers' plan of the model, or of the decoder of an image-text model: style by name pattern."""
    styles: dict[str, str] = {}
    prefix = decoder_name(model) or model.base_model_prefix
    for name, style in (getattr(text_config(model), "base_model_tp_plan", None) or {}).items():
        styles[name] = styles[f"{prefix}.{name}"] = style
    return styles | dict(getattr(model, "_tp_plan", None) or {})


def is_linear(module: nn.Module) -> bool:
    """Whether a module is `nn.Linear`, a subclass, or GPT-2's `Conv1D`."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2 and (isinstance(module, nn.Linear) or is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight has layout `[in, out]`."""
    return type(module).__name__ == "Conv1D"


def roles(model: PreTrainedModel) -> dict[str, Role]:
    """Roles of the sharded linears but the output layer, by name.

    A module is sharded only if it has both column and row linears. Layers with a recurrent state have functions of their own. A
    vision tower is replicated.
    """
    plan, head = transformers_tp_plan(model), model.get_output_embeddings()
    verified, decoder = text_config(model).model_type in VERIFIED, decoder_name(model)
    recurrent = tuple(f"{name}." for name, module in model.named_modules() if is_recurrent(module))
    role_by_name: dict[str, Role] = {}
    for name, module in model.named_modules():
        if not is_linear(module) or module is head or name.startswith(recurrent) or not name.startswith(decoder):
            continue
        if (role := _role(name, plan, verified)) is not None:
            role_by_name[name] = role
    sides: dict[str, set[str]] = {}
    for name, role in role_by_name.items():
        sides.setdefault(owner_of(name), set()).add(role)
    return {name: role for name, role in role_by_name.items() if len(sides[owner_of(name)]) == 2}


def _role(name: str, plan: Mapping[str, str], verified: bool) -> Role | None:
    leaf = leaf_of(name)
    style = plan.get(name_pattern(name), "")
    if style in _STYLES:
        return _STYLES[style]
    if not verified:
        return None
    if style in _GATHERED:
        return _GATHERED[style]
    return "columns" if leaf in _COLUMNS else "rows" if leaf in _ROWS else None


def owner_of(name: str) -> str:
    """Name of the module that a module or parameter belongs to; empty for the model itself."""
    return name.rpartition(".")[0]


def leaf_of(name: str) -> str:
    """The last part of a name."""
    return name.rpartition(".")[2]


def attention_modules(model: nn.Module, role_by_name: Mapping[str, Role]) -> dict[str, Any]:
    """Attention modules with a layer index and sharded projections, by name."""
    owners = {owner_of(name) for name, role in role_by_name.items() if role == "columns" and leaf_of(name) in ATTENTION}
    return {
        name: module
        for name, module in model.named_modules()
        if name in owners and isinstance(getattr(module, "layer_idx", None), int)
    }
