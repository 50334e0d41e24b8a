"""A tiny image-text model in a folder, with a tokenizer and a processor, and images for it."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from torchweave.config.model_source import resolve
from torchweave.verify import image_zoo, zoo

TEMPLATE = """{%- for m in messages %}{{ m.role + ': ' }}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- endfor %}{{ ' assistant: ' }}"""
IMAGE_TOKEN = 104


def picture(seed: int, width: int = 40, height: int = 50) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def save(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Save LLaVA with the built-in model's tokenizer; returns model and processor."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo").folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=size),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    entry = image_zoo.zoo_entry("llava-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    model = replace(entry, options={**entry.options, "image_token_id": IMAGE_TOKEN}).build()
    zoo.save(model, folder)
    processor.save_pretrained(folder)
    return model, processor


@torch.no_grad()
def reference(model: PreTrainedModel, processor: Any, text: str, images: list[Any], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers, without image tokens."""
    given = processor(text=text, images=images, return_tensors="pt")
    ids, tokens = given["input_ids"], []
    for _ in range(num_tokens):
        logits = model(input_ids=ids, pixel_values=given["pixel_values"], use_cache=False).logits[0, -1]
        logits[IMAGE_TOKEN] = -torch.inf
        tokens.append(int(logits.argmax()))
        ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
    return tokens
