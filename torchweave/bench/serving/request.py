"""A streamed request and its client-side statistics, as vLLM defines them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchweave.bench.serving.http import HttpClient

_ERROR_BYTES = 2000


@dataclass
class RequestStats:
    """Client-side statistics of a request; times in seconds of `time.perf_counter`.

    Attributes:
        start: time of sending.
        queued: wait in this client for `max_concurrency`.
        ttft: time from `start` to the first event with a choice.
        itl: gaps between events with a choice.
        latency: time from `start` to the last event with a choice.
        input_tokens, output_tokens: the server's counts; `input_tokens` is the planned number until then.
        error: the failure; empty on success.
    """

    input_tokens: int
    start: float = 0.0
    queued: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class EventStream:
    """Parser of a response's server-sent events."""

    def __init__(self, stats: RequestStats) -> None:
        self._seen = stats
        self._rest = b""
        self._last = 0.0
        self._texts: list[str] = []
        self.first_bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at `now`."""
        if len(self.first_bytes) < _ERROR_BYTES:
            self.first_bytes += data[:_ERROR_BYTES]
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._event(event, now)

    def _event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):  # a keep-alive comment
            return
        text = event[5:].lstrip()
        if text == b"[DONE]":
            return
        chunk = _decode(text)
        if chunk.error is not None:
            self._seen.error = f"error in the stream: {chunk.error}"
        if chunk.choices:
            self._token(chunk.choices[0], now)
        if chunk.usage is not None:
            self._seen.output_tokens = chunk.usage.completion_tokens or 0
            if chunk.usage.prompt_tokens is not None:
                self._seen.input_tokens = chunk.usage.prompt_tokens

    def _token(self, choice: _Choice, now: float) -> None:
        stats = self._seen
        if self._last:
            stats.itl.append(now - self._last)
        else:
            stats.ttft = now - stats.start
        self._last = now
        stats.latency = now - stats.start
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            self._texts.append(text)

    def finish(self, status: int) -> None:
        """Complete the statistics at the end of the response."""
        stats = self._seen
        stats.text = "".join(self._texts)
        if status != 200:
            stats.error = f"status {status}: {self.first_bytes.decode(errors='replace')[:_ERROR_BYTES]}"
        elif not self._last and not stats.error:
            stats.error = "the response held no token"
        elif not stats.error and not stats.output_tokens:  # no usage reported: assume one token per event
            stats.output_tokens = len(stats.itl) + 1


async def send_request(http: HttpClient, path: str, body: bytes, input_tokens: int) -> RequestStats:
    """Send a streamed request and read its response; failures are in `RequestStats.error`."""
    stats = RequestStats(input_tokens)
    stream = EventStream(stats)
    stats.start = time.perf_counter()
    try:
        stream.finish(await http.post(path, body, stream.feed))
    except (OSError, msgspec.DecodeError) as error:
        stats.error = f"{type(error).__name__}: {error}"
    return stats
