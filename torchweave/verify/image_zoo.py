"""Tiny image-text models, images of different sizes for them, and their reference tokens from transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from torchweave.images import EncodedPrompt, ImageInput
from torchweave.models.multimodal.image_encoder import image_features
from torchweave.models.multimodal.support import BOTH_WAYS, image_text_class
from torchweave.verify.zoo import VOCAB, Answer, ZooModel, build, greedy_answer, zoo_model

IMAGE_TOKEN = 250
_SIZE = 32  # pixels of a square image
_PATCH = 8
Tensors = dict[str, Tensor]
MakeImage = Callable[[int], Tensors]
"""The processor's tensors of one image of size 0, 1, 2, ..."""


@dataclass(frozen=True)
class ImageZooModel(ZooModel):
    """An image-text model of the zoo.

    Attributes:
        image: makes the tensors of one image.
        axis: dimension of `pixel_values` along which images of a prompt are concatenated.
    """

    image: MakeImage = lambda _: {}
    axis: int = 0

    def build(self, seed: int = 0) -> PreTrainedModel:
        """transformers' eager float32 model, with weights that make errors visible."""
        return build(self, seed, image_text_class(self.config())._from_config)


def _fixed(_: int) -> Tensors:
    return {"pixel_values": torch.randn(1, 3, _SIZE, _SIZE)}


def _stacked(size: int) -> Tensors:
    """Tiles as images: `[tiles, 3, H, W]`."""
    return {"pixel_values": torch.randn(1 + size, 3, _SIZE, _SIZE)}


def _tiles(size: int) -> Tensors:
    """Tiles of one image: `[1, tiles, 3, H, W]`."""
    return {"pixel_values": torch.randn(1, 1 + size, 3, _SIZE, _SIZE)}


def _any_resolution(size: int) -> Tensors:
    """A thumbnail and tiles, by the size of the original image."""
    height, width = ((24, 28), (24, 60), (60, 40))[size % 3]
    tiles = 1 + -(-height // _SIZE) * -(-width // _SIZE)
    return {
        "pixel_values": torch.randn(1, tiles, 3, _SIZE, _SIZE),
        "image_sizes": torch.tensor([[height, width]]),
    }


def _sized(size: int) -> Tensors:
    height, width = ((32, 16), (32, 32), (16, 32))[size % 3]
    return {"pixel_values": torch.randn(1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}


def _grid(dim: int) -> MakeImage:
    def image(size: int) -> Tensors:
        grid = torch.tensor([[1, 4 + 4 * (size // 2), 4 + 4 * (size % 2)]])
        return {"pixel_values": torch.randn(int(grid.prod()), dim), "image_grid_thw": grid}

    return image


_TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": _SIZE,
    "patch_size": _PATCH,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_CLIP = {**_TOWER, "projection_dim": 32, "model_type": "clip_vision_model"}
_SIGLIP = {**_TOWER, "vision_use_head": False, "model_type": "siglip_vision_model"}
_PIXTRAL = {**_TOWER, "head_dim": 16, "model_type": "pixtral", "rope_parameters": _ROPE}
_GRIDS = [[32, 32], [32, 64], [64, 32], [64, 64]]
_QWEN_TOKENS = {"video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": _PATCH,
}
_GLM_MROPE = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
_GLM_TOKENS = {"video_token_id": 251, "image_start_token_id": 252, "image_end_token_id": 253}
_GLM_TOWER = _QWEN_TOWER | {"intermediate_size": 64, "image_size": _SIZE}
_DEEPSTACK = _QWEN_TOWER | {"intermediate_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_PATCHES = _grid(3 * 2 * _PATCH * _PATCH)


def _text(model_type: str, **options: Any) -> dict[str, Any]:
    return {**_TEXT, "model_type": model_type, **options}


def _model(
    name: str, text: dict[str, Any], vision: dict[str, Any], image: MakeImage, axis: int = 0, **options: Any
) -> ImageZooModel:
    given = {"text_config": text, "vision_config": vision, "image_token_id": IMAGE_TOKEN, **options}
    return ImageZooModel(f"{name}-images", given, base=name, shared=False, image=image, axis=axis)


_MODELS: tuple[ImageZooModel, ...] = (
    _model("llava", _text("llama"), _CLIP, _fixed),
    _model("vipllava", _text("llama"), _CLIP, _fixed, vision_feature_layers=[-1, -2]),
    _model("llava_next", _text("mistral"), _CLIP, _any_resolution, image_grid_pinpoints=_GRIDS),
    _model(
        "llava_onevision",
        _text("qwen2"),
        _SIGLIP,
        _any_resolution,
        video_token_id=251,
        image_grid_pinpoints=_GRIDS,
    ),
    _model(
        "internvl", _text("qwen2"), _TOWER | {"image_size": [_SIZE, _SIZE], "patch_size": [_PATCH, _PATCH]}, _stacked
    ),
    _model("idefics3", _text("llama"), _TOWER, _tiles, axis=1, scale_factor=2),
    _model("smolvlm", _text("llama"), _TOWER, _tiles, axis=1, scale_factor=2),
    _model("mistral3", _text("mistral", head_dim=16), _PIXTRAL, _sized, spatial_merge_size=2),
    _model("lighton_ocr", _text("qwen3", head_dim=16), _PIXTRAL, _sized, spatial_merge_size=2),
    _model(
        "aya_vision",
        _text("cohere2", sliding_window=16),
        _SIGLIP,
        _stacked,
        downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
    ),
    _model(
        "cohere2_vision",
        _text("cohere2", sliding_window=16),
        _SIGLIP,
        _stacked,
        downsample_factor=2,
        alignment_intermediate_size=64,
    ),
    _model(
        "gemma3",
        _text(
            "gemma3_text",
            head_dim=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=False,
        ),
        _SIGLIP,
        _fixed,
        mm_tokens_per_image=16,
        tie_word_embeddings=False,  # tied, the scaled embedding of the last token decides alone
    ),
    _model(
        "qwen2_vl",
        _text("qwen2_vl_text", **_MROPE),
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": _PATCH, "mlp_ratio": 2},
        _PATCHES,
        **_QWEN_TOKENS,
    ),
    _model(
        "qwen2_5_vl",
        _text("qwen2_5_vl_text", **_MROPE),
        _QWEN_TOWER | {"intermediate_size": 64, "window_size": 32, "fullatt_block_indexes": [1]},
        _PATCHES,
        **_QWEN_TOKENS,
    ),
    _model("qwen3_vl", _text("qwen3_vl_text", head_dim=16, **_MROPE), _DEEPSTACK, _PATCHES, **_QWEN_TOKENS),
    _model(
        "qwen3_vl_moe",
        _text(
            "qwen3_vl_moe_text", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **_MROPE
        ),
        _DEEPSTACK,
        _PATCHES,
        **_QWEN_TOKENS,
    ),
    _model(
        "qwen3_5",
        _text(
            "qwen3_5_text",
            head_dim=16,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
        _QWEN_TOWER | {"intermediate_size": 64, "num_position_embeddings": 64},
        _PATCHES,
        **_QWEN_TOKENS,
    ),
    _model("glm4v", _text("glm4v_text", **_MROPE), _GLM_TOWER, _PATCHES, **_GLM_TOKENS),
    _model(
        "glm4v_moe",
        _text(
            "glm4v_moe_text",
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **_GLM_MROPE,
        ),
        _GLM_TOWER,
        _PATCHES,
        **_GLM_TOKENS,
    ),
    _model(
        "glm46v",
        _text("glm4v_text", **_GLM_MROPE),
        _GLM_TOWER | {"model_type": "glm4v_vision"},
        _PATCHES,
        **_GLM_TOKENS,
    ),
    _model("glm_ocr", _text("glm_ocr_text", head_dim=16, **_GLM_MROPE), _GLM_TOWER, _PATCHES, **_GLM_TOKENS),
    _model(
        "got_ocr2",
        _text("qwen2"),
        {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 4,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
        },
        lambda _: {"pixel_values": torch.randn(1, 3, 64, 64)},
    ),
    _model(
        "exaone4_5",
        _text("exaone4", sliding_window=16, sliding_window_pattern=2),
        _QWEN_TOWER
        | {"intermediate_size": 64, "num_key_value_heads": 2, "fullatt_block_indexes": [1], "window_size": 32},
        _PATCHES,
        **_QWEN_TOKENS,
    ),
)

IMAGE_MODELS = tuple(entry for entry in _MODELS if entry.model_type in CONFIG_MAPPING)
"""Image-text models that this version of transformers has, and the engine serves with images."""


def zoo_entry(name: str) -> ZooModel:
    """The model called `name`, of text or of images; ValueError suggests the nearest name."""
    return next((entry for entry in IMAGE_MODELS if entry.name == name), None) or zoo_model(name)


@torch.no_grad()
def image_prompts(entry: ImageZooModel, model: PreTrainedModel, seed: int = 0) -> list[EncodedPrompt]:
    """Prompts of text, of one image, of three images of different sizes, and of the same text with another image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text, one = (torch.randint(3, IMAGE_TOKEN - 10, (n,)).tolist() for n in (21, 9))
        return [
            EncodedPrompt(np.array(text)),
            _with_images(entry, model, one, [0]),
            _with_images(entry, model, text, [1, 0, 2]),
            _with_images(entry, model, one, [0]),
        ]


def _with_images(entry: ImageZooModel, model: PreTrainedModel, words: list[int], sizes: Sequence[int]) -> EncodedPrompt:
    """The words with images among them, the first after three words."""
    ids, images = words[:3], []
    for number, size in enumerate(sizes):
        tensors = entry.image(size)
        rows = len(image_features(model, tensors))
        index = np.arange(len(ids), len(ids) + rows, dtype=np.int32)
        images.append(ImageInput({name: tensor.numpy() for name, tensor in tensors.items()}, index))
        ids = ids + [IMAGE_TOKEN] * rows + words[3 + number : 4 + number]
    return EncodedPrompt(np.array(ids + words[3 + len(sizes) :]), tuple(images))


@torch.no_grad()
def image_reference_answers(
    entry: ImageZooModel, model: PreTrainedModel, prompts: Sequence[EncodedPrompt], num_tokens: int
) -> list[Answer]:
    """Greedy answers of transformers' eager model, which gets all images of a prompt at once; image tokens are excluded."""
    answers = []
    for prompt in prompts:
        given = _joined(entry, prompt.images)

        def logits_of(ids: list[int], given: dict[str, Any] = given) -> Tensor:
            if entry.model_type in BOTH_WAYS:
                given["token_type_ids"] = torch.tensor([[int(token == IMAGE_TOKEN) for token in ids]])
            if hasattr(model.model, "get_rope_index"):
                given["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE_TOKEN) for token in ids]])
            return model(input_ids=torch.tensor([ids]), use_cache=False, **given).logits[0, -1]

        answers.append(greedy_answer(prompt.token_ids.tolist(), num_tokens, logits_of, excluded=[IMAGE_TOKEN]))
    return answers


def _joined(entry: ImageZooModel, images: Sequence[ImageInput]) -> dict[str, Any]:
    """The tensors of all images as a processor returns them: padded with zeros to the largest."""
    joined = {}
    for name in images[0].tensors if images else ():
        tensors = [torch.from_numpy(image.tensors[name]) for image in images]
        axis = entry.axis if name == "pixel_values" else 0
        shapes = np.array([tensor.shape for tensor in tensors])
        largest = shapes.max(axis=0)
        largest[axis] = 0
        padded = []
        for tensor in tensors:
            missing = [max(int(most) - size, 0) for most, size in zip(largest, tensor.shape, strict=True)]
            padded.append(torch.nn.functional.pad(tensor, [end for each in missing[::-1] for end in (0, each)]))
        joined[name] = torch.cat(padded, dim=axis)
    return joined
