"""Workload of the load test: random prompts with a common prefix, and gamma-distributed arrivals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from torchweave.bench.serving.http import HttpClient
from torchweave.bench.serving.load_test import Lengths

CHAT = "chat/completions"
# The server tokenizes this sample to obtain ids of plain text: no special ids, none outside the vocabulary.
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog while 12 grey geese, 345 owls and 6 small mice look on; nobody knows why, "
    "but every day before noon they meet under an old oak tree near the river, sing songs of winter light and share bread. "
    "What would you say? Perhaps nothing. On Monday (or Friday) we shall ask them again, with paper, pen, ink, and 7,890 words."
)


@dataclass(frozen=True)
class Prompt:
    """A request body with the number of tokens of its prompt."""

    body: bytes
    input_tokens: int


def prompts(lengths: Lengths, count: int, seed: int, vocabulary: Vocabulary, fields: dict[str, Any]) -> list[Prompt]:
    """`count` requests with `fields` in each body, reproducible by seed."""
    random = np.random.default_rng(seed)
    prefix = vocabulary.draw(lengths.prefix_len, random)
    inputs, outputs = lengths.draw(count, random)
    requests = []
    for num_input, num_output in zip(inputs, outputs, strict=True):
        requested = vocabulary.prompt([*prefix, *vocabulary.draw(num_input, random)])
        body = json.dumps({**requested, vocabulary.max_tokens: num_output, **fields}).encode()
        requests.append(Prompt(body, lengths.prefix_len + num_input))
    return requests


class Vocabulary:
    """Items that prompts are drawn from: token ids if the server supports them, else words of about one token.

    Args:
        path: the endpoint.
        ids: token ids of plain text; empty: draw words.
    """

    def __init__(self, path: str, ids: Sequence[int]) -> None:
        self._is_chat = path.endswith(CHAT)
        self.exact = bool(ids) and not self._is_chat
        self._items: list[Any] = sorted(set(ids)) if self.exact else _words()
        self.max_tokens = "max_completion_tokens" if self._is_chat else "max_tokens"

    def draw(self, count: int, random: np.random.Generator) -> list[Any]:
        return [self._items[index] for index in random.integers(len(self._items), size=count).tolist()]

    def prompt(self, items: list[Any]) -> dict[str, Any]:
        content = items if self.exact else " ".join(items)
        return {"messages": [{"role": "user", "content": content}]} if self._is_chat else {"prompt": content}


def _words() -> list[str]:
    return sorted({word.strip(".,;?()").lower() for word in _SAMPLE.split()} - {""})


async def text_ids(http: HttpClient, model: str) -> list[int]:
    """Token ids of plain text from the server's `/tokenize`; empty if it has none."""
    parts: list[bytes] = []
    body = json.dumps({"model": model, "prompt": _SAMPLE, "add_special_tokens": False}).encode()
    status = await http.post("/tokenize", body, lambda part, _: parts.append(part))
    if status != 200:
        return []
    try:
        return msgspec.json.decode(b"".join(parts), type=_Tokens).tokens
    except msgspec.DecodeError:
        return []


class _Tokens(msgspec.Struct):
    tokens: list[int]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Sending times in seconds after the start.

    Gaps follow a gamma distribution of shape `burstiness` (1: Poisson process; larger: more even), scaled to `count / rate`
    seconds in total, as in vLLM, so that all seeds have the same rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()
