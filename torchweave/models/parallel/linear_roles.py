"""What each linear of a decoder is to tensor parallelism: its columns are divided, its rows are, or neither.

transformers' own plan of a model says it first (`base_model_tp_plan` of the config, `_tp_plan` of the class). Many models have
none, or one that leaves attention whole. For architectures whose tokens were compared with transformers' on several ranks
(`VERIFIED`) the names that transformers' models share fill the gaps. No other model is divided by guesswork: what its plan does not
divide stays whole, and a model whose attention would is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

Role = Literal["columns", "rows"]

# transformers' styles, of 5.17 as of 5.23, that divide a linear.
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
# Where a plan gathers the columns and splits the rows again, the two stand on both sides of something that the plan cannot
# divide: a fused projection, a norm over all heads. Of a known architecture it can be.
_GATHERED: Mapping[str, Role] = {
    "colwise_rep": "columns",
    "colwise_gather_output": "columns",
    "rowwise_rep": "rows",
    "rowwise_split_input": "rows",
}
VERIFIED = frozenset(
    {
        "afmoe", "apertus", "arcee", "biogpt", "bitnet", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "gemma", "gemma2", "gemma3_text",
        "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
        "gptj", "granite", "granite_swa", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
        "hyperclovax", "jais2", "llama", "llama4_text", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3",
        "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
        "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
        "vaultgemma", "youtu",
    }
)  # fmt: skip
"""Architectures (`model_type`) that give transformers' tokens on 2 and 4 ranks: docs/models.md."""
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
"""Linears whose heads are those of keys and values."""
PACKED = frozenset({"gate_up_proj", "input_linear"})
"""Linears whose columns are gate and up, one after the other."""
ATTENTION = frozenset({"q_proj", "q_b_proj", "qkv_proj", "query_key_value", "c_attn"})
"""An attention has one of these."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def name_pattern(name: str) -> str:
    """The name with a star for each number: what plans and reports call all layers' modules of that name."""
    return _NUMBER.sub(".*", name)


def transformers_tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """transformers' plan of the model: style by name, with a star for each number."""
    found: dict[str, str] = {}
    prefix = model.base_model_prefix
    for name, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items():
        found[name] = found[f"{prefix}.{name}"] = style
    return found | dict(getattr(model, "_tp_plan", None) or {})


def is_linear(module: nn.Module) -> bool:
    """A product with a matrix: `nn.Linear`, what inherits from it, GPT-2's `Conv1D`."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2 and (isinstance(module, nn.Linear) or is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight lies as `[in, out]`."""
    return type(module).__name__ == "Conv1D"


def roles(model: PreTrainedModel) -> dict[str, Role]:
    """Name of a linear -> its role, for those that have one; the output layer has none.

    A module with columns and no rows behind them, or the other way round, is left whole.
    """
    plan, head = transformers_tp_plan(model), model.get_output_embeddings()
    verified = model.config.model_type in VERIFIED
    found: dict[str, Role] = {}
    for name, module in model.named_modules():
        if is_linear(module) and module is not head and (role := _role(name, plan, verified)) is not None:
            found[name] = role
    sides: dict[str, set[str]] = {}
    for name, role in found.items():
        sides.setdefault(_owner(name), set()).add(role)
    return {name: role for name, role in found.items() if len(sides[_owner(name)]) == 2}


def _role(name: str, plan: Mapping[str, str], verified: bool) -> Role | None:
    leaf = name.rpartition(".")[2]
    style = plan.get(name_pattern(name), "")
    if style in _STYLES:
        return _STYLES[style]
    if not verified:
        return None
    if style in _GATHERED:
        return _GATHERED[style]
    return "columns" if leaf in _COLUMNS else "rows" if leaf in _ROWS else None


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def attention_modules(model: nn.Module, found: Mapping[str, Role]) -> dict[str, Any]:
    """Attention modules by name: they know their layer, and have projections that are divided."""
    owners = {
        _owner(name) for name, role in found.items() if role == "columns" and name.rpartition(".")[2] in ATTENTION
    }
    return {
        name: module
        for name, module in model.named_modules()
        if name in owners and isinstance(getattr(module, "layer_idx", None), int)
    }
