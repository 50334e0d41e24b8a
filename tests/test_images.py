"""Images as clients send them, and the arrays of processors."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.image_model import data_url, encoded, picture
from torchweave.images import ImageInput, ImageLimits, ImageProcessor, message_content, open_image, read_data_url
from torchweave.models.resolve import resolve


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have `width` x `height` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def test_images_are_decoded() -> None:
    image = picture(0)
    assert np.array_equal(np.asarray(open_image(encoded(image))), np.asarray(image))
    assert open_image(encoded(image.convert("L"), "JPEG")).mode == "RGB"
    assert read_data_url(data_url(b"abc")) == b"abc"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be decoded"),
        (b"<svg/>", "cannot be decoded"),
        (encoded(picture(0))[:200], "cannot be decoded"),
        (bomb(7000, 7000), "7000 x 7000 pixels, but at most 33554432"),
        (bomb(60000, 60000), "too many pixels"),
        (bomb(64, 64), "cannot be decoded"),
        (encoded(picture(0), "TIFF"), r"send a whole PNG, JPEG, WEBP, GIF or BMP file"),
    ],
)
def test_broken_and_large_images_are_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_image(content)


@pytest.mark.parametrize(
    "url", ["http://x/y.png", "file:///etc/passwd", "data:text/plain;base64,AA", "data:image/png,AA", ""]
)
def test_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no data URL"):
        read_data_url(url)


def test_random_bytes_give_one_sentence() -> None:
    random, whole = np.random.default_rng(0), encoded(picture(0))
    for _ in range(200):
        damaged = bytearray(whole)
        for place in random.integers(0, len(damaged), 4):
            damaged[place] = random.integers(256)
        try:
            open_image(bytes(damaged))
        except ValueError as error:
            assert str(error).endswith(".")


def test_contents_keep_image_parts_and_join_texts() -> None:
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert message_content(parts) is parts
    assert message_content(parts[:1] * 2) == "a\na"
    for wrong in ({"type": "image", "image": 1}, {"type": "image_url"}, {"type": "image_url", "image_url": {"url": 1}}):
        with pytest.raises(ValueError, match="image_url"):
            message_content([wrong])


def test_digests_tell_images_apart() -> None:
    pixels, index = np.zeros((4, 6), np.float32), np.arange(2, dtype=np.int32)
    images = [
        {"a": pixels},
        {"a": pixels.reshape(6, 4)},
        {"b": pixels},
        {"a": pixels.view(np.int32)},
        {"a": pixels + 1},
    ]
    assert len({ImageInput(tensors, index).digest for tensors in images}) == len(images)


def test_a_processor_with_videos_needs_no_torchvision(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo").folder)
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.init_kwargs.pop("processor_class", None)
    tokenizer.save_pretrained(tmp_path)
    Qwen2VLImageProcessorPil(patch_size=8, min_pixels=32 * 32, max_pixels=64 * 64).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}), encoding="utf-8")
    token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor = ImageProcessor(tmp_path, ImageLimits(token_id, 4))
    images = [picture(0), picture(1, 90, 20)]
    prompt = processor.encode("1 <|image_pad|> 2 <|image_pad|>", images)
    sizes = [int(image.tensors["image_grid_thw"].prod()) // 4 for image in prompt.images]
    assert [len(image.index) for image in prompt.images] == sizes
    assert (prompt.token_ids[np.concatenate([image.index for image in prompt.images])] == token_id).all()
    again = processor.encode("<|image_pad|> and more", images[1:])
    assert again.images[0].digest == prompt.images[1].digest, "an image alone is as among others"
    with pytest.raises(ValueError, match=r"5 images, but limit_mm_per_prompt.image is 4"):
        processor.encode("<|image_pad|>" * 5, images[:1] * 5)
