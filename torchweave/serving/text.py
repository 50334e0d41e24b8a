"""Text to tokens and back in the HTTP process: encoding on a thread of its own, so that a long prompt delays nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torchweave.models.tokenizer import TextStream, Tokenizer

Value = TypeVar("Value")


class Codec:
    """The model's tokenizer, twice: one encodes on its thread, the other decodes in the event loop."""

    def __init__(self, folder: str, chat_template: str | None = None) -> None:
        self._encoder = Tokenizer(Path(folder))
        self._decoder = Tokenizer(Path(folder))
        self._template = chat_template
        self._texts: dict[int, str] = {}  # of single tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchweave-encode")

    async def warm_up(self) -> None:
        """Read the files.

        Raises:
            ValueError: they cannot be read.
        """
        await self._on_thread(lambda: (self._encoder.encode("a"), self._decoder.decode([0])))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            ValueError: it is no text.
        """
        _check_text(text)
        return await self._on_thread(lambda: self._encoder.encode(text, add_special_tokens))

    async def chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        _check_text(json.dumps([messages, variables], ensure_ascii=False, default=str))
        if self._template is not None:
            variables["chat_template"] = self._template
        return await self._on_thread(lambda: self._encoder.chat(messages, **variables))

    @property
    def chat_template(self) -> str:
        """What turns conversations into text; empty for a model without one."""
        found = self._template or getattr(self._decoder.hugging_face, "chat_template", None) or ""
        return found if isinstance(found, str) else "\n".join(map(str, dict(found).values()))

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
        """A decoder of ids that arrive one after the other, behind a prompt."""
        return self._decoder.stream(prompt_ids, skip_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """The text of one token by itself."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decoder.token_text(token)
        return text

    async def _on_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text holds half of a surrogate pair at character {error.start}; send whole characters."
        ) from None
