"""Which image-text models are served with images. All others, and these without images, are served as text decoders."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

VERIFIED = frozenset(
    {
        "aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "got_ocr2", "idefics3",
        "internvl", "lighton_ocr", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5",
        "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava",
    }
)  # fmt: skip
"""Model types whose tokens were compared with transformers', with images; see docs/reference/models.md."""

BOTH_WAYS = frozenset({"gemma3"})
"""Those whose consecutive image tokens see each other in both directions."""
_REASONS = {
    "gemma3n": "it has embeddings of its own for every layer, which images need too",
    "gemma4": "it has embeddings of its own for every layer, which images need too",
    "mllama": "its images enter by cross-attention",
    "paligemma": "all tokens of its prompts see each other, those of text too",
}
"""Why model types are served without images, as clauses."""

_TOKEN_NAMES = ("image_token_id", "image_token_index")


def takes_images(config: Any) -> bool:
    """Whether a config is that of a model with a vision tower."""
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def image_rejection(config: Any) -> str:
    """Why a model with a vision tower is served without images, as a clause; empty if it is served with them."""
    if type(config) not in AutoModelForImageTextToText._model_mapping:
        return f"transformers maps {config.model_type} to no image-text model"
    if config.model_type not in VERIFIED:
        unknown = f"the tokens of {config.model_type} with images were not verified against transformers"
        return _REASONS.get(config.model_type, unknown)
    return ""


def image_text_class(config: Any) -> type[PreTrainedModel]:
    """transformers' image-text model of a config."""
    mapped: Any = AutoModelForImageTextToText._model_mapping[type(config)]
    return mapped[0] if isinstance(mapped, tuple) else mapped


def attention_at_load(config: Any) -> str:
    """Attention with which transformers builds a model; a decoder's is replaced, a vision tower keeps it.

    A tower does not run with `eager` where it can be avoided: a matrix of patches x patches does not fit for a large image.
    """
    return "sdpa" if takes_images(config) and image_text_class(config)._supports_sdpa else "eager"


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The text decoder of an image-text model; any other model as a whole."""
    return model.get_decoder() if takes_images(model.config) else model  # type: ignore[attr-defined]


def decoder_name(model: PreTrainedModel) -> str:
    """Name of the text decoder within an image-text model; empty for any other model."""
    decoder = decoder_of(model)
    return next(name for name, module in model.named_modules() if module is decoder)


def text_config(model: PreTrainedModel) -> Any:
    """Config of the decoder that reads the tokens."""
    return model.config.get_text_config() if takes_images(model.config) else model.config


def image_token_id(config: Any) -> int:
    """Id of the token that stands for a row of an image in a prompt."""
    return int(next(getattr(config, name) for name in _TOKEN_NAMES if getattr(config, name, None) is not None))
