"""Log-probabilities in OpenAI's two forms, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweave.engine.request import TokenLogprobs
from torchweave.serving.text import Codec


def chat_logprobs(codec: Codec | None, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for entry in entries:
        best = list(entry.top.items())[:num_top]
        content.append(
            {
                **_token(codec, entry.token_id, entry.logprob),
                "top_logprobs": [_token(codec, token, logprob) for token, logprob in best],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    codec: Codec | None,
    entries: Sequence[TokenLogprobs | None],
    offset: int,
    skip_special_tokens: bool,
    first_token: int | None = None,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion.

    Args:
        entries: None for the first token of a prompt, of which nothing is known.
        offset: where the text of the first token begins.
        skip_special_tokens: they are no part of the text.
        first_token: the token that the entry None stands for.
    """
    texts: list[str] = []
    offsets: list[int] = []
    for entry in entries:
        token = first_token if entry is None else entry.token_id
        texts.append("" if token is None else token_text(codec, token))
        offsets.append(offset)
        if token is not None:
            offset += len(texts[-1]) if codec is None else codec.length(token, skip_special_tokens)
    return {
        "tokens": texts,
        "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
        "top_logprobs": [None if entry is None else _by_text(codec, entry) for entry in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(codec: Codec | None, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt a map from token id to what is known of it."""
    return [None if entry is None else _ranked(codec, entry) for entry in entries]


def _ranked(codec: Codec | None, entry: TokenLogprobs) -> dict[str, Any]:
    def known(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(codec, token)}

    found = {str(token): known(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top.items(), 1)}
    return {str(entry.token_id): known(entry.token_id, entry.logprob, entry.rank)} | found


def _by_text(codec: Codec | None, entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the one that was drawn; of those with the same text the most likely."""
    found: dict[str, float] = {}
    for token, logprob in {**entry.top, entry.token_id: entry.logprob}.items():
        text = token_text(codec, token)
        found[text] = max(found.get(text, logprob), logprob)
    return found


def _token(codec: Codec | None, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(codec, token)
    # A token may be part of a character: it has no text of its own, and its bytes are not known here.
    known = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}


def token_text(codec: Codec | None, token: int) -> str:
    return f"token_id:{token}" if codec is None else codec.token_text(token)
