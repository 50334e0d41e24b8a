"""Images as clients send them, and the arrays of processors."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.image_model import data_url, encoded, picture
from torchweave import images
from torchweave.config.model_source import resolve
from torchweave.images import (
    ImageInput,
    ImageLimits,
    ImageProcessor,
    message_content,
    open_image,
    read_data_url,
    split_images,
)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have `width` x `height` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def run_length_encoded(width: int, height: int) -> bytes:
    """A BMP of which Pillow decodes one end of line after the other, pixel by pixel in Python."""
    palette, data = bytes(1024), b"\1\1" + bytes(2 * height)
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(data), 0, 0, 1078) + sizes + palette + data


def progressive(extra_scans: int) -> bytes:
    """A JPEG whose last scan is repeated."""
    content = encoded_with(picture(0), "JPEG", progressive=True)
    return content[:-2] + (b"\xff\xda" + content.rpartition(b"\xff\xda")[2][:-2]) * extra_scans + content[-2:]


def encoded_with(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_images_are_decoded() -> None:
    image = picture(0)
    assert np.array_equal(np.asarray(open_image(encoded(image))), np.asarray(image))
    assert open_image(encoded(image.convert("L"), "JPEG")).mode == "RGB"
    assert read_data_url(data_url(b"abc")) == b"abc" == read_data_url("DATA:image/PNG;BASE64,YWJj")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    assert open_image(encoded_with(image, "JPEG", exif=exif)).size == image.size[::-1]


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
        (encoded(picture(0, 201, 1)), "longer side may have at most 200 times the pixels of the shorter one"),
        (encoded(picture(0, 1, 201)), "longer side may have at most 200 times"),
        (run_length_encoded(5000, 5000), "run-length encoded"),
        (progressive(60), "more than 64 scans"),
    ],
)
def test_broken_and_large_images_are_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_image(content)


def test_narrow_images_and_progressive_ones_are_decoded() -> None:
    assert open_image(encoded(picture(0, 200, 1))).size == (200, 1)
    assert open_image(progressive(50)).size == (40, 50)
    preview = b"\xff\xe1" + struct.pack(">H", 2 + 600) + b"\xff\xda" * 300
    whole = encoded(picture(0), "JPEG")
    assert open_image(whole[:2] + preview + whole[2:]).size == (40, 50), "what looks like scans in the metadata is none"


def test_the_images_of_a_conversation_share_a_limit_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PROMPT_PIXELS", 5000)
    part = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(0)))}}
    message = {"role": "user", "content": [part, part]}
    assert len(split_images([message], 9)[1]) == 2
    with pytest.raises(ValueError, match="and 5000 in all images of a prompt"):
        split_images([message, message], 9)


def test_too_many_images_are_refused_before_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "open_image", lambda *_: pytest.fail("it was decoded"))
    part = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(0)))}}
    with pytest.raises(ValueError, match="more than 16 images"):
        split_images([{"role": "user", "content": [part] * 10}] * 1000, 16)


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


def test_contents_keep_their_parts() -> None:
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert message_content(parts) is parts
    assert message_content(parts[:1] * 2) == parts[:1] * 2
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


def test_several_images_are_processed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA-NeXT's processor pads the arrays of several images to the largest, and writes a text by each image's size."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo").folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    grids = [[32, 64], [64, 32], [64, 64]]
    size = {"height": 32, "width": 32}
    pixels = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=size, image_grid_pinpoints=grids)
    own = LlavaNextProcessor(
        pixels, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    own.save_pretrained(tmp_path)
    processor = ImageProcessor(tmp_path, ImageLimits(tokenizer.convert_tokens_to_ids("<image>"), 4))
    options: dict[str, Any] = {"add_special_tokens": False}
    text, images = "a <image>\n\nb<image><image>", [picture(0), picture(1, 90, 20), picture(2, 33, 77)]
    expected = own(text=text, images=images, **options)["input_ids"][0]
    alone = [processor.encode("<image>", [image]).images[0].digest for image in images]
    calls: list[int] = []
    process = LlavaNextImageProcessorPil.__call__

    def count(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        calls.append(len(images))
        return process(self, images, *args, **options)

    monkeypatch.setattr(LlavaNextImageProcessorPil, "__call__", count)
    prompt = processor.encode(text, images, **options)
    assert calls == [1, 1, 1]
    assert prompt.token_ids.tolist() == expected
    assert [image.digest for image in prompt.images] == alone


def test_a_processor_that_needs_the_arrays_of_all_images_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo").folder)
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values(), "<video>"]})
    for name, token in {**names, "video_token": "<video>"}.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    monkeypatch.setattr(
        InternVLProcessor, "check_argument_for_proper_class", lambda *_: None
    )  # videos need torchvision
    pixels = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4)
    own = InternVLProcessor(pixels, tokenizer, None, image_seq_length=4)
    monkeypatch.setattr(images, "_load_processor", lambda *_: own)
    processor = ImageProcessor(Path(), ImageLimits(tokenizer.context_image_token_id, 4))
    text, pictures = "a <IMG_CONTEXT> b<IMG_CONTEXT>", [picture(0), picture(1, 90, 20)]
    prompt = processor.encode(text, pictures)
    assert prompt.token_ids.tolist() == own(text=text, images=pictures)["input_ids"][0]
    assert [len(image.index) for image in prompt.images] == [
        4 * len(image.tensors["pixel_values"]) for image in prompt.images
    ]
