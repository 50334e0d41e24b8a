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


def completion_logprobs(codec: Codec | None, entries: Sequence[TokenLogprobs | None], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the text of the first token begins. None is a token of which
    nothing is known: the first of a prompt."""
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for entry in entries:
        text = token_text(codec, entry.token_id) if entry is not None else ""
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if entry is None else entry.logprob)
        top.append(None if entry is None else _by_text(codec, entry))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


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
