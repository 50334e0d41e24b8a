"""Answers that take too long, and clients that leave: without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from torchweave.serving.answers import Delta, Run
from torchweave.serving.delivery import answer_stream, answer_whole
from torchweave.serving.errors import ApiError


class SlowRun:
    """Says one thing, and then nothing for ever."""

    closed = False

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        yield [Delta(0, "a", [1], None, [])]
        await asyncio.sleep(60)

    async def whole(self) -> list[Delta]:
        return [delta async for deltas in self.deltas() for delta in deltas]

    def close(self) -> None:
        self.closed = True


class PlainReply:
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        return [{"text": delta.text}]

    def last_chunk(self) -> dict[str, Any]:
        return {"last": True}

    def whole(self, answers: list[Delta]) -> dict[str, Any]:
        return {"texts": [answer.text for answer in answers]}


async def stays() -> dict[str, str]:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


async def leaves() -> dict[str, str]:
    await asyncio.sleep(0.05)
    return {"type": "http.disconnect"}


def stream(run: SlowRun, seconds: float, receive: Any) -> list[str]:
    """The events of a stream, as a client sees them."""
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def go() -> None:
        await answer_stream(cast(Run, run), PlainReply(), seconds, with_usage=True)(
            {"type": "http"}, receive, cast(Any, send)
        )

    asyncio.run(go())
    return [line.removeprefix("data: ") for line in b"".join(sent).decode().split("\n\n") if line]


def test_E1_an_answer_that_takes_too_long_is_504() -> None:
    run = SlowRun()
    with pytest.raises(ApiError, match=r"longer than the 0\.1 seconds") as refused:
        asyncio.run(answer_whole(cast(Run, run), PlainReply(), stays, 0.1))
    assert refused.value.status == 504 and run.closed


def test_E1_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    run = SlowRun()
    first, error, done = stream(run, 0.1, stays)
    assert json.loads(first) == {"text": "a"} and done == "[DONE]" and run.closed
    assert "longer than the 0.1 seconds" in json.loads(error)["error"]["message"]


def test_E1_who_leaves_ends_the_run() -> None:
    run = SlowRun()
    assert stream(run, 0, leaves) == ['{"text":"a"}'] and run.closed
    run = SlowRun()
    assert asyncio.run(answer_whole(cast(Run, run), PlainReply(), leaves, 0)).status_code == 499 and run.closed
