"""Resolve a model name to a folder or a config: built-in models, folders, hub ids and benchmark shapes.

Importing this module does not import torch: a wrong name is refused before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchweave.config.options import expand_path

BUILT_IN = {"demo": "demo", "demo-draft": "demo_draft", "demo-eagle": "demo_eagle"}
"""Built-in models, and the draft head of `demo`: name -> folder in `_BUILT_IN_FOLDER`."""
_BUILT_IN_FOLDER = Path(__file__).parents[1] / "models"

_LLAMA_3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN_3 = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_QWEN3_8B = _QWEN_3 | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "shape:llama-1b": _LLAMA_3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA_3["rope_parameters"] | {"factor": 32.0},
    },
    "shape:llama-8b": _LLAMA_3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "shape:llama-70b": _LLAMA_3
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "head_dim": 128,
        "intermediate_size": 28672,
        "tie_word_embeddings": False,
    },
    "shape:qwen3-0.6b": _QWEN_3
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "shape:qwen3-30b-a3b": _QWEN_3
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "shape:gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(24)],
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "shape:qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "shape:falcon-h1-7b": {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "vocab_size": 130048,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "hidden_size": 3072,
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 12288,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 128,
        "tie_word_embeddings": False,
    },
    "shape:granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    },
    "shape:lfm2-1.2b": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "shape:qwen3-8b": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_QWEN3_8B},
    "shape:qwen3-vl-8b": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": _QWEN3_8B
        | {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
            },
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096},
        "tie_word_embeddings": False,
    },
    "shape:gemma-3-4b": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "dtype": "bfloat16",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 10240,
            "sliding_window": 1024,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
}
"""Published model shapes without weights, for `load_format: dummy`."""

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Source of a model: a folder or a config.

    Attributes:
        name: the name given by the user, or the config's model type.
        folder: files of the checkpoint; None for a shape.
        config: the config if there is no folder.
    """

    name: str
    folder: Path | None
    config: dict[str, Any] | None = None


def resolve(
    name: str | Path | Mapping[str, Any],
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Source:
    """Find a model by name.

    Args:
        revision: branch, tag or commit of a hub model; None: its main branch.
        download_dir: folder for a hub model; None: Hugging Face's cache.

    Raises:
        ValueError: the model exists neither locally nor on the hub, or the hub is unreachable.
    """
    if isinstance(name, Mapping):
        return Source(str(name.get("model_type", "config")), None, dict(name))
    source, text = local_source(name, revision), str(name)
    if source is not None:
        return source
    return Source(text, _checked(_download(text, trust_remote_code, revision, download_dir), text))


def local_source(name: str | Path, revision: str | None = None) -> Source | None:
    """Find a model on this machine by name; None for a hub id.

    Raises:
        ValueError: the name is neither a hub id nor that of a model here.
    """
    text = str(name)
    source = _named_source(text)
    if source is not None and revision is not None:
        raise ValueError(f"revision={revision!r} is of a model on the hub, but {text!r} is here; leave revision out.")
    if source is None and not (
        isinstance(name, str) and _HUB_ID.fullmatch(text) and not text.startswith((".", "/", "~"))
    ):
        raise ValueError(
            f"No model at {text!r}: expected a folder in Hugging Face's layout, a hub id like 'organisation/model', "
            f"or one of {', '.join(sorted(BUILT_IN))}."
        )
    return source


def resolve_tokenizer(name: str, trust_remote_code: bool = False, download_dir: str | None = None) -> Path:
    """Find the folder of a tokenizer by name: a folder, a hub id or a built-in model.

    Raises:
        ValueError: it exists neither here nor on the hub.
    """
    folder = expand_path(name)
    if folder.is_dir():
        return folder
    found = resolve(name, trust_remote_code, download_dir=download_dir).folder
    if found is None:
        raise ValueError(f"tokenizer={name!r} is a shape without files; give a folder or a hub id.")
    return found


def _named_source(text: str) -> Source | None:
    """A built-in model, a shape or a folder; None if there is none of that name."""
    if text in SHAPES:
        return Source(text, None, dict(SHAPES[text]))
    if text.startswith("shape:"):
        raise ValueError(f"Unknown shape {text!r}: the shapes are {', '.join(sorted(SHAPES))}.")
    if text in BUILT_IN:
        return Source(text, _checked(_BUILT_IN_FOLDER / BUILT_IN[text], text))
    folder = expand_path(text)
    try:
        if folder.exists():
            return Source(text, _checked(folder, text))
    except OSError as error:  # e.g. a name that is too long or missing permissions
        raise ValueError(
            f"{text[:100]!r} cannot be read ({error.strerror}); give the path of a model folder."
        ) from error
    return None


def is_eagle_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, in either published form."""
    names = config.get("architectures") or ()
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "eagle3"
    return any("eagle3" in name.lower() for name in names if isinstance(name, str))


def reject_draft_head(name: str, folder: Path) -> None:
    """Reject a folder that is no model of its own.

    Raises:
        ValueError: it is a draft head.
    """
    if is_eagle_head(read_json(folder / "config.json")):
        raise ValueError(
            f"{name} is an EAGLE-3 draft head and no model: it drafts for the model that it was trained for. Name that model, and "
            f"add --speculative_config.method eagle3 --speculative_config.model {name}."
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError if the file holds none."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; copy or download the file again.")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Read a JSON list; ValueError if the file holds none."""
    content = _read_json(path)
    if not isinstance(content, list):
        raise ValueError(f"{path} is not a JSON list; copy or download the file again.")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy or download the file again.") from error


def _checked(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise ValueError(f"{name!r} is a file: expected the model's folder, with config.json and *.safetensors in it.")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} has no config.json: expected a model folder in Hugging Face's layout.")
    return folder


def _download(
    hub_id: str, trust_remote_code: bool, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Files of a hub model, from the local hub cache or the network."""
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"] + (["*.py"] if trust_remote_code else [])
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                cache_dir=None if download_dir is None else expand_path(download_dir),
                allow_patterns=patterns,
                # Of subfolders only JSON: that of sentence-transformers' pooling.
                ignore_patterns=["*/*/*", *(f"*/{pattern}" for pattern in patterns if pattern != "*.json")],
            )
        )
    except RevisionNotFoundError as error:
        raise ValueError(f"{hub_id!r} has no revision {revision!r}; give a branch, a tag or a commit of it.") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{hub_id!r} is gated: accept its terms on the hub and log in with `hf auth login`, then try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{hub_id!r} is neither a local folder nor a model on the hub; check the spelling.") from error
    except HFValidationError as error:
        raise ValueError(f"{hub_id!r} is neither a local folder nor a valid hub id.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{hub_id!r} is not a local folder, and the hub is unreachable; give the path of a model folder."
        ) from error
