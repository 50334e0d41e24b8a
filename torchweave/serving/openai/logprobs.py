"""Log-probabilities in OpenAI's two formats, and in vLLM's format for prompts.

Lists with an item for each token are iterators: an answer may have megabytes of them, which are encoded in slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torchweave.engine.request import TokenLogprobs
from torchweave.serving.tokenization import AsyncTokenizer


def chat_logprobs(tokenizer: AsyncTokenizer | None, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Build `choices[].logprobs` of a chat completion; its `content` is an iterator."""

    def content(entry: TokenLogprobs) -> dict[str, Any]:
        best = itertools.islice(entry.top.items(), None if num_top == -1 else num_top)
        top = [_token(tokenizer, token, logprob) for token, logprob in best]
        return {**_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}

    return {"content": map(content, entries), "refusal": None}


class TextOffsets:
    """Character offsets of consecutive tokens. All tokens of one character have the offset of the character.

    Args:
        prompt: tokens before the first.
        begin: offset of the first token.
        skip_special_tokens: whether the text excludes special tokens.
    """

    def __init__(
        self, tokenizer: AsyncTokenizer | None, prompt: Sequence[int], begin: int, skip_special_tokens: bool
    ) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream(prompt, skip_special_tokens)
        self._end = begin

    def of(self, token: int) -> int:
        """Return the offset of the next token."""
        begin = self._end
        self._end += len(token_text(None, token) if self._stream is None else self._stream.feed([token]))
        return begin


def completion_logprobs(
    tokenizer: AsyncTokenizer | None,
    entries: Sequence[TokenLogprobs | None],
    text_offsets: TextOffsets,
    first_token: int | None = None,
) -> dict[str, Any]:
    """Build `choices[].logprobs` of a completion: iterators over its tokens.

    Args:
        entries: None for the first token of a prompt, which has no log-probability.
        first_token: the token of the entry None.
    """
    tokens = [first_token if entry is None else entry.token_id for entry in entries]
    return {
        "tokens": ("" if token is None else _text_or_bytes(tokenizer, token) for token in tokens),
        "token_logprobs": (None if entry is None else entry.logprob for entry in entries),
        "top_logprobs": (None if entry is None else _by_text(tokenizer, entry) for entry in entries),
        "text_offset": (0 if token is None else text_offsets.of(token) for token in tokens),
    }


def prompt_logprobs(
    tokenizer: AsyncTokenizer | None, entries: Sequence[TokenLogprobs | None]
) -> Iterator[dict[str, Any] | None]:
    """Build vLLM's `prompt_logprobs`: for each prompt token a map from token id to log-probability, rank and text."""
    return (None if entry is None else _ranked(tokenizer, entry) for entry in entries)


def _ranked(tokenizer: AsyncTokenizer | None, entry: TokenLogprobs) -> dict[str, Any]:
    def details(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token)}

    top = {str(token): details(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top.items(), 1)}
    return {str(entry.token_id): details(entry.token_id, entry.logprob, entry.rank)} | top


def _by_text(tokenizer: AsyncTokenizer | None, entry: TokenLogprobs) -> dict[str, float]:
    """Log-probabilities of the top tokens and the sampled token by text; of equal texts the most likely token counts."""
    logprobs: dict[str, float] = {}
    for token, logprob in {**entry.top, entry.token_id: entry.logprob}.items():
        text = _text_or_bytes(tokenizer, token)
        logprobs[text] = max(logprobs.get(text, logprob), logprob)
    return logprobs


def _token(tokenizer: AsyncTokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    own = text.encode() if tokenizer is None else tokenizer.bytes_of(token)
    return {"token": text, "logprob": logprob, "bytes": None if own is None else list(own)}


def _text_or_bytes(tokenizer: AsyncTokenizer | None, token: int) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them: `bytes: \\xf0\\x9f`."""
    text = token_text(tokenizer, token)
    if tokenizer is None or "\N{REPLACEMENT CHARACTER}" not in text or (own := tokenizer.bytes_of(token)) is None:
        return text
    return "bytes:" + own.decode(errors="backslashreplace")


def token_text(tokenizer: AsyncTokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)
