"""Response timeouts and disconnecting clients, without an engine."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from tests.serving.watched import watched
from torchweave.engine.request import SamplingParams
from torchweave.images import ImageLimits
from torchweave.serving.errors import ApiError
from torchweave.serving.http.responses import EventStream, respond
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.openai.answer_parser import AnswerFormat
from torchweave.serving.openai.generation import AnswerStream, Delta
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest
from torchweave.serving.openai.response_builders import ChatResponseBuilder, CompletionResponseBuilder, event


class SlowRun:
    """Says one thing, and then nothing for ever."""

    closed = False
    began = False
    tokenizer = None
    params = SamplingParams(n=2)

    async def next(self) -> list[Delta]:
        if self.began:
            await asyncio.sleep(60)
        self.began = True
        return [Delta(0, "a", [1], None, [])]

    async def full(self) -> list[Delta]:
        return [*await self.next(), *await self.next()]

    def close(self) -> None:
        self.closed = True


class PlainReply:
    def events(self, delta: Delta) -> bytes:
        return event({"text": delta.text})

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return event({"last": True})

    def failure(self, error: ApiError) -> bytes:
        return event(error.body) + b"data: [DONE]\n\n"

    def full(self, answers: list[Delta]) -> dict[str, Any]:
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
        await EventStream(cast(AnswerStream, run), PlainReply(), seconds)({"type": "http"}, receive, cast(Any, send))

    asyncio.run(go())
    return [line.removeprefix("data: ") for line in b"".join(sent).decode().split("\n\n") if line]


def whole(run: SlowRun, seconds: float, receive: Any) -> None:
    """Wait for the response that is not streamed."""
    service = SimpleNamespace(settings=SimpleNamespace(request_timeout=seconds))
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    request = Request({"type": "http", "app": app, "headers": []}, receive)
    asyncio.run(respond(request, False, cast(AnswerStream, run), cast(Any, PlainReply())))


def test_an_answer_that_takes_too_long_is_504() -> None:
    run = SlowRun()
    with pytest.raises(ApiError, match=r"longer than the 0\.1 seconds") as refused:
        whole(run, 0.1, stays)
    assert refused.value.status == 504 and run.closed
    assert refused.value.body["error"]["type"] == "server_error"


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    run = SlowRun()
    first, error, done = stream(run, 0.1, stays)
    assert json.loads(first) == {"text": "a"} and done == "[DONE]" and run.closed
    assert "longer than the 0.1 seconds" in json.loads(error)["error"]["message"]


def test_timed_out_stream_ends_even_if_unread() -> None:
    run = SlowRun()

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    async def go() -> None:
        reply = EventStream(cast(AnswerStream, run), PlainReply(), 0.05)
        sending = asyncio.create_task(reply({"type": "http"}, stays, cast(Any, send)))
        await asyncio.sleep(0.2)
        assert run.closed and not sending.done()
        sending.cancel()

    asyncio.run(go())


def test_a_disconnected_client_cancels_its_requests() -> None:
    run = SlowRun()
    assert stream(run, 0, leaves) == ['{"text":"a"}'] and run.closed
    run = SlowRun()
    with pytest.raises(ApiError) as refused:
        whole(run, 0, leaves)
    assert refused.value.status == 499 and run.closed


@pytest.mark.parametrize("text", ["b", 'a "quote"\nb', "\0text\0", "ü\u2028v"])
def test_events_with_text_alone_are_like_all_others(text: str) -> None:
    """They are written once with a gap for the text, which may hold anything."""
    run = cast(AnswerStream, SlowRun())
    completion = CompletionResponseBuilder(run, CompletionRequest(prompt="", n=2), "1", "a \0 model")
    messages = [{"role": "user", "content": "a"}]
    chat = ChatResponseBuilder(run, ChatRequest.model_validate({"messages": messages}), "1", "m", AnswerFormat())
    for reply in (completion, chat):
        for index in (0, 1):
            reply.events(Delta(index, "the first one may be another", [1], None, []))
            short = body_of(reply.events(Delta(index, text, [1], None, [])))
            last = body_of(reply.events(Delta(index, text, [1], "stop", [])))
            assert short["choices"][0].pop("finish_reason") is None
            assert last["choices"][0].pop("finish_reason") == "stop"
            assert last["choices"][0].pop("stop_reason") is None and last["choices"][0].pop("matched_stop") is None
            assert short == last


def body_of(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n\n") == 1
    return json.loads(event[len(b"data: ") :])


class SlowTokenizer:
    """Encodes images for ever."""

    chat_template = ""
    begun = ended = 0

    async def chat(self, messages: list[Any], **_: Any) -> list[int]:
        self.begun += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.ended += 1
        return [1]


URL = "data:image/png;base64,AA"
CHAT = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
MESSAGES = {"messages": [{"role": "user", "content": [BLOCK]}]}
INPUT = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/tokenize", CHAT),
        ("/v1/messages", MESSAGES | {"max_tokens": 1}),
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses", INPUT),
    ],
)
def test_no_image_is_processed_for_a_client_that_left(path: str, body: dict[str, Any]) -> None:
    """Also in a short body: its image may be large, or at an address."""
    app, client, _ = watched(state="ready")
    client.model = ModelCard("demo", None, "D", "float32", "cpu", None, 1, 512, 4, 104, 1, 16, images=ImageLimits(7, 3))
    tokenizer = app.state.service.tokenizer = SlowTokenizer()
    text = json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "state": {}}
    received: list[Any] = [{"type": "http.request", "body": text, "more_body": False}]

    async def receive() -> Any:
        if received:
            return received.pop()
        while not tokenizer.begun:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    async def run() -> None:
        async with asyncio.timeout(5):
            await app(scope, receive, send)

    asyncio.run(run())
    assert tokenizer.begun == tokenizer.ended == 1
