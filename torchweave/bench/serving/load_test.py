"""Parameters of a load test."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

GOODPUT = ("ttft", "tpot", "e2el")
"""Metrics that may have a limit."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: uniform in [floor(mean (1 - ratio)), ceil(mean (1 + ratio))], as vLLM's random data set."""

    input_len: int
    output_len: int
    range_ratio: float
    prefix_len: int

    def __post_init__(self) -> None:
        _check(
            self,
            ("input_len", self.input_len >= 0, "at least 0"),
            ("output_len", self.output_len >= 1, "at least 1"),
            ("range_ratio", 0 <= self.range_ratio < 1, "in [0, 1)"),
            ("prefix_len", self.prefix_len >= 0, "at least 0"),
        )
        if self.prefix_len + self.bounds(self.input_len)[0] < 1:
            raise ValueError(f"input_len={self.input_len} is too small: a prompt needs at least one token")

    def bounds(self, mean: int) -> tuple[int, int]:
        return math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))

    def draw(self, count: int, random: np.random.Generator) -> tuple[list[int], list[int]]:
        """Prompt lengths without the common prefix, and output lengths."""
        low, high = self.bounds(self.input_len)
        inputs = random.integers(low, high + 1, size=count).tolist()
        low, high = self.bounds(self.output_len)
        return inputs, random.integers(max(1, low), max(1, high) + 1, size=count).tolist()


@dataclass(frozen=True)
class LoadTest:
    """Requests of a load test, as the options of `bench serve`.

    Attributes:
        base_url: server address, `http://HOST:PORT`. The API key comes from OPENAI_API_KEY.
        endpoint: `/v1/completions` or `/v1/chat/completions`.
        model: model name. None: the first that the server lists.
        num_prompts: number of requests.
        request_rate: requests per second; `inf` sends all at once.
        burstiness: shape of the arrivals: 1 is a Poisson process, smaller values are burstier, larger ones more even.
        max_concurrency: most open requests; further ones wait in this client. None: no limit.
        input_len: mean prompt length in tokens, without the common prefix.
        output_len: mean number of requested output tokens.
        range_ratio: relative half-width of the uniform distribution of lengths around the mean.
        prefix_len: tokens of a prefix common to all prompts.
        ignore_eos: generate the full output length.
        temperature: sampling temperature.
        extra_body: JSON object with further fields of every request.
        goodput: latency limits in milliseconds, `ttft:200,tpot:30,e2el:5000`; the goodput counts requests within all.
        metric_percentiles: percentiles to report for each metric.
        num_warmups: requests before the measurement; at least one is sent.
        ready_check_timeout_sec: seconds to wait for the server.
        save_detailed: include the data of every request in the result.
        seed: random seed of the workload.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str | None = None
    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: str | None = None
    goodput: tuple[str, ...] = ()
    metric_percentiles: tuple[float, ...] = (99.0,)
    num_warmups: int = 0
    ready_check_timeout_sec: float = 600.0
    save_detailed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check(
            self,
            ("num_prompts", self.num_prompts >= 1, "at least 1"),
            ("request_rate", self.request_rate > 0, "above 0, or inf"),
            ("burstiness", self.burstiness > 0, "above 0"),
            ("max_concurrency", self.max_concurrency is None or self.max_concurrency >= 1, "at least 1, or null"),
            ("num_warmups", self.num_warmups >= 0, "at least 0"),
            ("metric_percentiles", all(0 <= each <= 100 for each in self.metric_percentiles), "between 0 and 100"),
            ("endpoint", self.endpoint.startswith("/"), "a path such as /v1/completions"),
        )
        _ = self.lengths, self.limits, self.request_fields  # raise ValueError

    @property
    def server_url(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.input_len, self.output_len, self.range_ratio, self.prefix_len)

    @property
    def limits(self) -> dict[str, float]:
        """Latency limits in milliseconds by metric."""
        return dict(_limit(text) for text in self.goodput)

    @property
    def request_fields(self) -> dict[str, Any]:
        """Further fields of every request."""
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {"temperature": self.temperature, **eos, **_object(self.extra_body)}


def _check(parameters: object, *checks: tuple[str, bool, str]) -> None:
    """Raise ValueError for the first of the checks (parameter, whether it holds, what is expected) that fails."""
    for name, holds, expected in checks:
        if not holds:
            raise ValueError(f"{name}={getattr(parameters, name)} is not valid: it must be {expected}")


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name not in GOODPUT or not limit >= 0:
        raise ValueError(
            f"goodput={text!r} is not valid: it takes NAME:MILLISECONDS, the name one of {', '.join(GOODPUT)}"
        )
    return name, limit


def _object(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"extra_body={text!r} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"extra_body={text!r} is not valid: it takes an object such as '{{\"top_k\": 5}}'")
    return fields
