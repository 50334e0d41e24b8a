"""Images of a prompt as the engine takes them: arrays from the checkpoint's own processor and the tokens that they replace.

Neither torch nor Pillow is imported before the first image, since HTTP processes of text models need neither.
"""

from __future__ import annotations

import base64
import binascii
import copy
import functools
import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchweave.chat_template import TemplateTraits, adapt, content_text, probe
from torchweave.tokenizer import check_text, without_advice

_DIGEST_BYTES = 16
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
MAX_IMAGE_PIXELS = 1 << 25
"""Largest image that is decoded: 128 MiB in memory."""
MAX_PROMPT_PIXELS = 1 << 27
"""Pixels of all images of a conversation, which are in memory at the same time."""
_MAX_ASPECT_RATIO = 200
"""Processors scale the shorter side to a fixed length, the longer one with it; Qwen2-VL's has the same limit."""
_MAX_SCANS = 64
"""Each scan of a progressive JPEG costs a pass over all pixels; encoders write about ten."""
_JPEG_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # markers without a length, and stuffed bytes, are none
_END_OF_IMAGE, _START_OF_SCAN = b"\xd9", b"\xda"


@dataclass(frozen=True)
class ImageInput:
    """One image of a prompt.

    Attributes:
        tensors: the processor's arrays of this image alone, by the argument of transformers' `get_image_features`.
        index: int32, ascending positions of the image's tokens in the prompt.
        digest: hash of `tensors`; images of the same digest are the same.
    """

    tensors: Mapping[str, np.ndarray]
    index: np.ndarray
    digest: bytes = b""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self.tensors))


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids, with its images in their order."""

    token_ids: np.ndarray
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True)
class ImageLimits:
    """How the prompts of a model with images are encoded.

    Attributes:
        token_id: the model's id of image tokens.
        max_images: most images of a prompt; 0: the model is served without images.
        reason: why it is, as a clause.
    """

    token_id: int = 0
    max_images: int = 0
    reason: str = "the model has no vision tower"


class PromptIds(list[int]):
    """Token ids of a prompt, with its images in their order."""

    def __init__(self, prompt: EncodedPrompt) -> None:
        super().__init__(prompt.token_ids.tolist())
        self.images = prompt.images


def images_of(prompt: Sequence[int]) -> tuple[ImageInput, ...]:
    """The images of a prompt; none for a plain list of token ids."""
    return prompt.images if isinstance(prompt, PromptIds) else ()


def _digest(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Hash of the names, dtypes, shapes and contents of arrays."""
    content = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        content.update(f"{name} {array.dtype.str} {array.shape};".encode())
        content.update(array.tobytes())
    return content.digest()


# -- images as clients send them ---------------------------------------------------------------------------------------


def open_image(data: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """Decode a file to an RGB image of Pillow; what its pixels cost is checked before they are decoded.

    Raises:
        ValueError: the file is damaged, too large, too slow to decode, or no image.
    """
    pillow, exif = _import_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
                check_size(image, max_pixels)
                _check_decoder(image, data)
                image.load()
                exif(image, in_place=True)
                return image.convert("RGB")
    except _TooCostly:
        raise
    except pillow.DecompressionBombError:
        raise ValueError(f"The image has too many pixels; send one of at most {max_pixels}.") from None
    except Exception as error:  # Pillow's decoders raise errors of any kind for damaged files
        raise ValueError(
            f"The image cannot be decoded ({type(error).__name__}); send a whole {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} file."
        ) from error


class _TooCostly(ValueError):
    pass


def check_size(image: Any, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Raise ValueError for an image of more than `max_pixels` pixels, or one that is too narrow."""
    width, height = image.size
    if width * height > max_pixels:
        raise _TooCostly(
            f"The image has {width} x {height} pixels, but at most {MAX_IMAGE_PIXELS} are allowed, and {MAX_PROMPT_PIXELS} in all "
            "images of a prompt; send a smaller one."
        )
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        raise _TooCostly(
            f"The image has {width} x {height} pixels, but its longer side may have at most {_MAX_ASPECT_RATIO} times the pixels "
            "of the shorter one; send a part of it."
        )


def _check_decoder(image: Any, data: bytes) -> None:
    """Raise ValueError for a file of few bytes that takes long to decode, whatever its size in pixels."""
    if any(
        tile[0] in _import_pillow()[0].DECODERS for tile in image.tile
    ):  # written in Python, which stops other threads
        raise _TooCostly("The BMP file is run-length encoded; send an uncompressed one, or a PNG file.")
    if data.startswith(b"\xff\xd8") and _has_more_scans(data, _MAX_SCANS):
        raise _TooCostly(f"The JPEG file has more than {_MAX_SCANS} scans; save it with fewer, or send a PNG file.")


def _has_more_scans(data: bytes, most: int) -> bool:
    """Whether a JPEG has more than `most` scans before its end; those of previews in its metadata are not counted."""
    scans, at = 0, 2
    while scans <= most and (found := _JPEG_SEGMENT.search(data, at)) and found[1] != _END_OF_IMAGE:
        scans += found[1] == _START_OF_SCAN
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return scans > most


def blank_image(width: int, height: int) -> Any:
    """A black image of `width` x `height` pixels."""
    return _import_pillow()[0].new("RGB", (width, height))


def read_data_url(url: str) -> bytes:
    """The content of a `data:image/...;base64,...` URL.

    Raises:
        ValueError: another URL, or invalid base64.
    """
    head, comma, content = url.partition(",")
    if not re.fullmatch(r"data:image/.*;base64", head, re.IGNORECASE) or not comma:
        raise ValueError(
            f"The image URL {url[:40]!r} is no data URL of an image; send the image itself, as data:image/png;base64,..., since "
            "a server fetches from hosts of allowed_media_hosts only."
        )
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"The image's data URL is not valid base64 ({error}); send the whole file.") from None


def _import_pillow() -> tuple[Any, Callable[..., Any]]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ValueError("Images need Pillow, which is not installed; install torchweave[images].") from error
    return Image, ImageOps.exif_transpose


def split_images(messages: Sequence[Mapping[str, Any]], max_images: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages of a conversation with `{"type": "image"}` in place of each image, and the images as Pillow's.

    Args:
        max_images: most images of a conversation.

    An image part is `{"type": "image", "image": PIL.Image}` or OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`.

    Raises:
        ValueError: there are too many images, which are counted before one is decoded, one cannot be decoded, they are too large
            together, or a part is of another kind.
    """
    if sum(map(_is_image_part, _parts(messages))) > max_images:
        raise ValueError(f"The conversation has more than {max_images} images (limit_mm_per_prompt); send fewer.")
    texts, images, pixels_left = [], [], MAX_PROMPT_PIXELS
    for message in messages:
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            texts.append(dict(message))
            continue
        parts = []
        for part in content:
            image = _part_image(part, min(pixels_left, MAX_IMAGE_PIXELS))
            if image is not None:
                images.append(image)
                pixels_left -= image.width * image.height
            parts.append({"type": "image"} if image is not None else part)
        texts.append({**message, "content": parts})
    return texts, images


def _part_image(part: Any, max_pixels: int) -> Any:
    """The image of a content part, of at most `max_pixels` pixels; None for a text part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        return _as_image(part.get("image"))
    if kind == "image_url":
        url = image_url(part)
        if not isinstance(url, str):
            raise ValueError(
                'An image_url part is {"type": "image_url", "image_url": {"url": ...}}; this one has no URL.'
            )
        return open_image(read_data_url(url), max_pixels)
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    raise ValueError("A content part is a text, an image or an image_url; this one is none of them.")


def _as_image(image: Any) -> Any:
    """Check and convert an image of Pillow."""
    pillow, _ = _import_pillow()
    if not isinstance(image, pillow.Image):
        raise ValueError(f"An image must be a PIL.Image, but is {type(image).__name__}.")
    check_size(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def message_content(content: Any) -> Any:
    """The content of a message of the chat API: its text or its parts.

    Raises:
        ValueError: a part is neither a text nor an `image_url`.
    """
    if not has_images([{"content": content}]):
        content_text(content)
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "image_url"):
            raise ValueError("a part of a content with images is a text or an image_url")
        if part["type"] == "image_url" and not isinstance(image_url(part), str):
            raise ValueError('expected {"type": "image_url", "image_url": {"url": ...}}, but got a part without a URL')
        if part["type"] == "text":
            content_text([part])
    return content


def image_url(part: Any) -> Any:
    """The URL of an `image_url` part, given by itself or in an object; None for another part."""
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return None
    url = part.get("image_url")
    return url.get("url") if isinstance(url, Mapping) else url


def has_images(messages: Any) -> bool:
    """Whether a conversation has image parts."""
    return isinstance(messages, (list, tuple)) and any(map(_is_image_part, _parts(messages)))


def _parts(messages: Sequence[Any]) -> Iterator[Any]:
    """The parts of all contents that are lists."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, (list, tuple)) else ()


def _is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


# -- the checkpoint's processor ----------------------------------------------------------------------------------------


class ImageProcessor:
    """The processor of a checkpoint: texts with image placeholders and images in, token ids and arrays out. Thread-safe.

    Args:
        folder: contains the processor's files.
        limits: of the model.

    Raises:
        ValueError: the model is served without images, or its processor cannot be read.
    """

    def __init__(self, folder: Path, limits: ImageLimits, trust_remote_code: bool = False) -> None:
        if not limits.max_images:
            raise ValueError(f"This model is served without images: {limits.reason}.")
        _import_pillow()
        self.token_id = limits.token_id
        self._max_images = limits.max_images
        try:
            self._processor = _load_processor(folder, trust_remote_code)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"The image processor of {folder} cannot be read: {why}") from error
        self._traits: dict[str | None, TemplateTraits] = {}  # of the chat template used last
        self.placeholder: str = getattr(self._processor, "image_token", None) or "<image>"

    def encode(self, text: str, images: Sequence[Any], **options: Any) -> EncodedPrompt:
        """Encode a text with as many placeholders as images of Pillow.

        Raises:
            ValueError: another number of images, or the processor fails on one.
        """
        if len(images) > self._max_images:
            raise ValueError(
                f"The prompt has {len(images)} images, but limit_mm_per_prompt.image is {self._max_images}; send fewer, or raise "
                "the limit."
            )
        if text.count(self.placeholder) != len(images):
            raise ValueError(
                f"The prompt has {text.count(self.placeholder)} placeholders ({self.placeholder}) for {len(images)} images; write "
                "one for each."
            )
        images = [_as_image(image) for image in images]
        texts: list[str] = []
        if len(images) == 1:
            ids, tensors = self._run(self._processor, text, images, options)
            alone, counts = [tensors], [int((ids == self.token_id).sum())]
        else:  # by themselves, since processors join the arrays of several images in many ways
            alone, counts = [], []
            for image in images:
                ids, tensors = self._run(_recorder(self._processor, texts), self.placeholder, [image], {})
                alone.append(tensors)
                counts.append(int((ids == self.token_id).sum()))
            ids = self._run_text(text, images, texts, options)
        index = np.flatnonzero(ids == self.token_id).astype(np.int32)
        if sum(counts) != len(index) or 0 in counts:
            raise ValueError(
                "The processor wrote another number of image tokens than its images have; use fewer images."
            )
        ends = np.cumsum(counts)
        indices = [index[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]
        return EncodedPrompt(ids, tuple(map(ImageInput, alone, indices)))

    def _run_text(self, text: str, images: Sequence[Any], texts: list[str], options: Mapping[str, Any]) -> np.ndarray:
        """Token ids of a text, of whose images the processor wrote `texts` in place of the placeholders."""
        if len(texts) == len(images):
            try:
                return self._run(_with_texts(self._processor, texts), text, images, options)[0]
            except ValueError:  # InternVL's joins the arrays afterwards, and finds none
                pass
        return self._run(self._processor, text, images, options)[0]

    def _run(
        self, processor: Any, text: str, images: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        try:
            output = processor(text=text, images=list(images), return_tensors="np", **options)
        except Exception as error:  # processors raise errors of any kind for images that they do not support
            why = " ".join(str(error).split())[:200].rstrip(".")
            raise ValueError(f"The image cannot be processed ({why}); send another one.") from error
        tensors = {name: np.asarray(each) for name, each in output.items() if name not in _TEXT_OUTPUTS}
        return np.asarray(output["input_ids"]).reshape(-1).astype(np.int64), tensors

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        content_format: Literal["auto", "string", "openai"] = "auto",
        **variables: Any,
    ) -> EncodedPrompt:
        """Encode a conversation with images with the model's chat template; see `split_images` for its parts, and `adapt`.

        Raises:
            ValueError: the model has no template, or the template rejects the messages.
        """
        messages, images = split_images(messages, self._max_images)
        check_text(json.dumps([messages, variables], ensure_ascii=False, default=str))
        messages = adapt(messages, self._template_traits(variables.get("chat_template")), content_format)
        text = self._render(messages, variables)
        if text is None or text.count(self.placeholder) != len(images):  # a template for texts only
            text = self._render([self._flat(message) for message in messages], variables)
        if text is None:
            raise ValueError("The model's chat template rejects the messages; see its documentation.")
        begin = getattr(self._processor.tokenizer, "bos_token", None)
        starts = begin is not None and text.startswith(begin)
        return self.encode(text, images, **({"add_special_tokens": False} if starts else {}))

    def _template_traits(self, template: str | None) -> TemplateTraits:
        """What the processor's chat template takes; `template` replaces it."""
        if template not in self._traits:
            given = {} if template is None else {"chat_template": template}
            render = functools.partial(
                self._processor.apply_chat_template, tokenize=False, add_generation_prompt=True, **given
            )
            source = template or str(getattr(self._processor, "chat_template", ""))
            self._traits = {template: probe(render, source)}
        return self._traits[template]

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        given = {"add_generation_prompt": True, **variables}
        try:
            return self._processor.apply_chat_template(list(messages), tokenize=False, **given)
        except Exception:  # templates are programs
            return None

    def _flat(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose content is one text with placeholders."""
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            return dict(message)
        texts = [self.placeholder if part.get("type") == "image" else part["text"] for part in content]
        return {**message, "content": "\n".join(texts)}


def _recorder(processor: Any, texts: list[str]) -> Any:
    """A copy of a processor that appends to `texts` what it writes in place of placeholders."""
    replace = getattr(processor, "get_text_with_replacements", None)
    if replace is None:
        return processor

    def record(text: Any, images_replacements: Sequence[str] = (), *args: Any, **kwargs: Any) -> Any:
        texts.extend(images_replacements)
        return replace(text, images_replacements, *args, **kwargs)

    copied = copy.copy(processor)
    copied.get_text_with_replacements = record
    return copied


def _with_texts(processor: Any, texts: list[str]) -> Any:
    """A copy of a processor that writes `texts` in place of placeholders and ignores images."""
    copied = copy.copy(processor)
    copied._process_images = lambda images, **options: ({}, texts)
    return copied


def _load_processor(folder: Path, trust_remote_code: bool) -> Any:
    with without_advice():
        from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception:
        processor = _without_videos(folder)
        if processor is None:
            raise
    if not hasattr(processor, "image_processor"):
        raise ValueError("it has a tokenizer only.")
    return processor


def _without_videos(folder: Path) -> Any:
    """The processor without its part for videos, which needs torchvision; None if it has no such part."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    cls: Any = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(folder)), None)
    if cls is None or "video_processor" not in cls.get_attributes():
        return None
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "video_processor": None,
    }
    file = folder / "processor_config.json"
    options = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    options = {name: value for name, value in options.items() if name not in (*parts, "processor_class", "auto_map")}
    # The constructor checks the class of each part, and None has none.
    own = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
    return own(**parts, chat_template=getattr(parts["tokenizer"], "chat_template", None), **options)
