"""Tokenization in the HTTP process. Encoding runs on separate threads, so that prompts do not block the event loop."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchweave.chat_template import TemplateTraits
from torchweave.engine.detokenizer import encode_bad_words
from torchweave.engine.request import SamplingParams
from torchweave.images import ImageLimits, ImageProcessor, PromptIds, has_images
from torchweave.tokenizer import IncrementalDetokenizer, Tokenizer, check_text

Value = TypeVar("Value")
NO_IMAGES = ImageLimits()
_IMAGE_THREADS = 2  # that decode and process images
_PATHS = ("_file", "_path")  # ends of the names of settings that hold paths of this machine
_LONG = 1 << 16
"""Texts with more characters (about 50 ms) are encoded on a thread of their own, so that others do not wait for them."""


class AsyncTokenizer:
    """Copies of the model's tokenizer: two encode, each on a thread, the third decodes in the event loop. Created by `open`.

    Args:
        template: chat template that replaces the model's.
        images: how prompts with images are encoded.
    """

    def __init__(
        self, encoder: Tokenizer, decoder: Tokenizer, template: str | None, images: ImageLimits = NO_IMAGES
    ) -> None:
        self._encoder = encoder
        self._decoder = decoder
        self._template = template
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchweave-encode")
        self._image_limits = images
        self._image_processor: ImageProcessor | None = None
        self._image_lock = threading.Lock()
        self._image_threads = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix="torchweave-images")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="torchweave-encode-long")
        self._long_encoder: Tokenizer | None = None  # read with the first long text: most servers get none

    @classmethod
    async def open(
        cls,
        folder: str,
        template: str | None = None,
        trust_remote_code: bool = False,
        images: ImageLimits = NO_IMAGES,
    ) -> AsyncTokenizer:
        """Load the tokenizer of a model folder.

        Raises:
            ValueError: its files cannot be read.
        """
        return await asyncio.to_thread(cls._read, folder, template, trust_remote_code, images)

    @classmethod
    def _read(cls, folder: str, template: str | None, trust_remote_code: bool, images: ImageLimits) -> AsyncTokenizer:
        encoder, decoder = (Tokenizer(Path(folder), trust_remote_code) for _ in range(2))
        encoder.encode("a")
        decoder.decode([0])
        return cls(encoder, decoder, template, images)

    async def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Encode a text; for `max_tokens` see `Tokenizer.encode`.

        Raises:
            ValueError: the text is not valid Unicode, or certainly has more than `max_tokens` tokens.
        """
        return await self._on_thread(
            lambda tokenizer: tokenizer.encode(text, add_special_tokens, max_tokens), len(text)
        )

    async def encode_pair(self, text: str, other: str, max_tokens: int | None = None) -> list[int]:
        """Encode two texts as one prompt; see `Tokenizer.encode_pair`."""
        size = len(text) + len(other)
        return await self._on_thread(lambda tokenizer: tokenizer.encode_pair(text, other, max_tokens), size)

    async def chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Encode a conversation with the chat template.

        Raises:
            ValueError: the model has no template, the template rejects the messages, or see `encode`.
        """
        if self._template is not None:
            variables.setdefault("chat_template", self._template)
        if has_images(messages):
            variables.pop("max_prompt_tokens", None)  # the processor counts images' tokens too
            if variables.pop("add_special_tokens", False):
                raise ValueError("add_special_tokens cannot be combined with images; leave it out.")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._image_threads, lambda: self._image_chat(messages, variables))
        return await self._on_thread(
            lambda tokenizer: _chat(tokenizer, messages, variables), _size(messages, variables)
        )

    def _image_chat(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> PromptIds:
        with self._image_lock:
            if self._image_processor is None:
                folder, trust = self._encoder.folder, self._encoder.trust_remote_code
                self._image_processor = ImageProcessor(folder, self._image_limits, trust)
        return PromptIds(self._image_processor.chat(messages, **variables))

    async def template_traits(self, template: str | None = None) -> TemplateTraits:
        """What a chat template takes; None: that of the server."""
        source = template or self._template
        return await self._on_thread(lambda tokenizer: tokenizer.template_traits(source), 0)

    @property
    def chat_template(self) -> str:
        """Source of the chat template, of several joined; empty for a model without one."""
        template = self._template or getattr(self._decoder.hf_tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How the checkpoint says that answers to its own chat template are parsed.

        None if it does not, if the template is not its own, or if transformers is older than 5.24.
        """
        tokenizer = self._decoder.hf_tokenizer
        template = getattr(tokenizer, "response_template", None)
        known = self._template is None and hasattr(tokenizer, "get_response_parser") and isinstance(template, dict)
        return template if known else None

    def response_parser(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]] | None) -> Any:
        """Create transformers' parser of one answer after the prompt that ends with `prefix`.

        Raises:
            ValueError: the template is invalid.
        """
        return self._decoder.hf_tokenizer.get_response_parser(template, prefix=prefix, tools=tools)

    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration as JSON, without paths, with its class, special tokens and chat template."""
        tokenizer = self._decoder.hf_tokenizer
        config = {name: value for name, value in tokenizer.init_kwargs.items() if not name.endswith(_PATHS)}
        named = {"tokenizer_class": type(tokenizer).__name__, "chat_template": self.chat_template or None}
        facts = {**config, **tokenizer.special_tokens_map, **named}
        return msgspec.to_builtins(facts, str_keys=True, enc_hook=str)  # special tokens are objects: their texts

    async def encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with `bad_words` as token ids, as the engine requires."""
        return await self._on_thread(
            lambda tokenizer: encode_bad_words(params, functools.partial(tokenizer.encode, add_special_tokens=False)),
            sum(map(len, params.bad_words or ())),
        )

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> IncrementalDetokenizer:
        """Create an incremental decoder for the answer to a prompt."""
        return self._decoder.stream(prompt_ids, skip_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._decoder.decode(ids, skip_special_tokens)

    async def decode_long(self, ids: Sequence[int]) -> str:
        """`decode`, on a thread."""
        return await self._on_thread(lambda tokenizer: tokenizer.decode(ids, False), len(ids))

    def token_text(self, token: int) -> str:
        """Text of a single token."""
        return self._decoder.token_text(token)

    def bytes_of(self, token: int) -> bytes | None:
        """Bytes of a single token; see `Tokenizer.bytes_of`."""
        return self._decoder.bytes_of(token)

    def token_of(self, text: str) -> int | None:
        """The token that is exactly this text; None if the text is several tokens."""
        ids = self._decoder.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    async def _on_thread(self, work: Callable[[Tokenizer], Value], size: int) -> Value:
        """Run `work` with the tokenizer of the thread for texts of `size` characters."""
        loop = asyncio.get_running_loop()
        if size <= _LONG:
            return await loop.run_in_executor(self._thread, work, self._encoder)
        return await loop.run_in_executor(self._long_thread, self._run_long, work)

    def _run_long(self, work: Callable[[Tokenizer], Value]) -> Value:
        if self._long_encoder is None:
            self._long_encoder = Tokenizer(self._encoder.folder, self._encoder.trust_remote_code)
        return work(self._long_encoder)

    def close(self) -> None:
        for threads in (self._thread, self._long_thread, self._image_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def _size(*values: Any) -> int:
    """Bytes of values as JSON; many for those that JSON cannot hold."""
    try:
        return len(msgspec.json.encode(values, enc_hook=str))
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
        return _LONG + 1


def _chat(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
    check_text(json.dumps([messages, variables], ensure_ascii=False, default=str))
    return tokenizer.chat(messages, **variables)
