"""Token texts and offsets of logprobs agree with the text, for every tokenizer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Rust
from transformers import PreTrainedTokenizerFast

from tests.models.test_tokenizer import byte_level, sentence_piece
from torchweave.engine.request import TokenLogprobs
from torchweave.serving.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from torchweave.serving.tokenization import AsyncTokenizer

BYTES = r"^bytes:|\\x[0-9a-f]{2}"


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_texts_and_places_of_tokens_are_those_of_the_text(make: Callable[[], Rust], tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = asyncio.run(AsyncTokenizer.open(str(tmp_path)))
    prompt = asyncio.run(tokenizer.encode("Hello world"))
    both = asyncio.run(tokenizer.encode("Hello world, don't 🎉panic ."))
    answer = both[len(prompt) :]
    assert both[: len(prompt)] == prompt

    echoed = lists(
        completion_logprobs(tokenizer, [None, *map(entry, prompt[1:])], TextOffsets(tokenizer, [], 0, True), prompt[0])
    )
    text_offsets = TextOffsets(tokenizer, prompt, len("Hello world"), True)
    found = lists(completion_logprobs(tokenizer, list(map(entry, answer)), text_offsets))
    assert "".join(echoed["tokens"]).lstrip() == "Hello world"
    assert "".join(re.sub(BYTES, "", token) for token in found["tokens"]) == ", don't panic ."
    text = "Hello world, don't 🎉panic ."
    offsets = [*echoed["text_offset"], *found["text_offset"]]
    ends = [*offsets[1:], len(text)]
    for token, begin, end in zip([*echoed["tokens"], *found["tokens"]], offsets, ends, strict=True):
        whole = re.sub(BYTES, "", token)  # a part of the character has no text
        assert (whole.lstrip() if begin == 0 else whole) == text[begin:end].replace("🎉", "")
    tokenizer.close()


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_bytes_of_tokens_join_to_the_text(make: Callable[[], Rust], tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = asyncio.run(AsyncTokenizer.open(str(tmp_path)))
    text = "Hello 🎉 日本 👍🏽."
    answer = [
        token for token in asyncio.run(tokenizer.encode(text)) if tokenizer.token_text(token) not in ("<s>", "</s>")
    ]
    content = list(chat_logprobs(tokenizer, list(map(entry, answer)), 1)["content"])
    assert any("\ufffd" in item["token"] for item in content)
    assert bytes(byte for item in content for byte in item["bytes"]).decode().lstrip() == text
    assert all(item["top_logprobs"][0]["bytes"] == item["bytes"] for item in content)
    tokenizer.close()


def lists(logprobs: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in logprobs.items()}


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, {token: -1.0})
