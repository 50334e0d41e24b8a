"""One streamed request, and what its client saw of it: vLLM's meanings of first token, gaps and latency."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchweave.bench.serving.http import HttpClient

_ERROR_BYTES = 2000


@dataclass
class RequestStats:
    """What a client saw of one request; times in seconds, `start` and those that follow from it by `time.perf_counter`.

    Attributes:
        start: when the request was sent.
        queued: how long it had waited in this client for its turn (`max_concurrency`).
        ttft: from `start` to the first event with a choice.
        itl: between one event with a choice and the next.
        latency: from `start` to the last event with a choice.
        input_tokens, output_tokens: as the server counts them; before it has, `input_tokens` is what was meant.
        error: why it failed; empty when it did not.
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
    """Reads the events of one answer as their bytes arrive."""

    def __init__(self, stats: RequestStats) -> None:
        self._seen = stats
        self._rest = b""
        self._last = 0.0
        self._texts: list[str] = []
        self.first_bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes that came at `now`."""
        if len(self.first_bytes) < _ERROR_BYTES:
            self.first_bytes += data[:_ERROR_BYTES]
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._event(event, now)

    def _event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):  # a comment keeps the connection alive
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
        """The answer is whole."""
        stats = self._seen
        stats.text = "".join(self._texts)
        if status != 200:
            stats.error = f"status {status}: {self.first_bytes.decode(errors='replace')[:_ERROR_BYTES]}"
        elif not self._last and not stats.error:
            stats.error = "the answer held no token"
        elif not stats.error and not stats.output_tokens:  # a server that reports no usage: one token an event
            stats.output_tokens = len(stats.itl) + 1


async def send_request(http: HttpClient, path: str, body: bytes, input_tokens: int) -> RequestStats:
    """Send one streamed request and read it to its end; what goes wrong is in `RequestStats.error`."""
    stats = RequestStats(input_tokens)
    stream = EventStream(stats)
    stats.start = time.perf_counter()
    try:
        stream.finish(await http.post(path, body, stream.feed))
    except (OSError, msgspec.DecodeError) as error:
        stats.error = f"{type(error).__name__}: {error}"
    return stats
