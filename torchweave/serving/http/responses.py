"""Responses of generation requests, full or streamed, with a time limit; canceled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from torchweave.serving.errors import ApiError, api_error
from torchweave.serving.http.bodies import LONG_BODY, on_thread
from torchweave.serving.http.middleware import (
    CLIENT,
    CLIENT_CLOSED_REQUEST,
    STREAM_SEND,
    WARNINGS,
    Receive,
    Send,
    cancel_on_disconnect,
    header,
)
from torchweave.serving.openai.generation import AnswerStream
from torchweave.serving.openai.protocol import ChatRequest, left_out_fields
from torchweave.serving.openai.response_builders import ResponseBuilder
from torchweave.serving.request_warnings import RequestWarnings
from torchweave.serving.service import Service, service_of

Value = TypeVar("Value")
_NESTED = (dict, list, Iterator)
_SLICE_SECONDS = 0.005  # of an answer's encoding, between which other requests run
_LONG_BODY = 1 << 16  # bytes
_ANSWER_TIMEOUT = "The answer took longer than the {:g} seconds that this server allows per request; lower max_tokens."


def begin(body: Any, request: Request) -> tuple[Service, str]:
    """The server, and the model's name for the response. Unknown fields of the body become warnings.

    Args:
        body: validated body with a field `model`.

    Raises:
        ApiError: 404, no such model is served; 400, an unknown field, where the server refuses those.
    """
    service = service_of(request)
    name = service.check_model(body.model)
    for field in dict.fromkeys(re.sub(r"\.\d+(?=\.)", "", name)[:80] for name in left_out_fields(body)):
        if service.settings.unknown_request_fields == "refuse":
            raise ApiError(400, f"unknown field {field!r}; leave it out; /docs lists the known fields.")
        warnings_of(request).add("unknown_field", f"The field {field} is unknown and was left out.")
    return service, name


def warnings_of(request: Request) -> RequestWarnings:
    """The warnings of a request, which its response's header contains."""
    return request.scope[WARNINGS]


def client_of(request: Request) -> str:
    """Who sent a request, see `CLIENT`."""
    return request.scope.get(CLIENT, "")


def json_response(answer: dict[str, Any]) -> Response:
    """The answer; FastAPI's own encoder walks through every item in Python."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def respond(request: Request, stream: bool, answer_stream: AnswerStream, builder: ResponseBuilder) -> Response:
    """The response of a request: its answers as they come, or in one body.

    Raises:
        ApiError: 504 after `request_timeout`, or the client disconnected.
        EngineUnavailable: the engine ended.
    """
    seconds = service_of(request).settings.request_timeout
    if stream:
        return EventStream(answer_stream, builder, seconds)

    async def answer() -> bytes:
        return await encode_in_slices(builder.full(await answer_stream.full()))

    try:
        async with time_limit(seconds):
            body = await unless_disconnected(answer(), request, takes_long=True)
    finally:
        answer_stream.close()
    return Response(body, media_type="application/json")


async def encode_in_slices(body: dict[str, Any]) -> bytes:
    """The JSON of a body. The items of its iterators are encoded for some milliseconds at a time, between which others run."""
    return msgspec.json.encode(await _encoded(body))


async def _encoded(value: Any) -> Any:
    """A value whose iterators have become lists of encoded items, which take a fifth of the memory of objects."""
    if isinstance(value, dict):
        return {name: await _encoded(each) if isinstance(each, _NESTED) else each for name, each in value.items()}
    if isinstance(value, list):
        return [await _encoded(each) if isinstance(each, dict) else each for each in value]
    items, until = [], time.perf_counter() + _SLICE_SECONDS
    for item in value:
        items.append(msgspec.Raw(msgspec.json.encode(item)))
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + _SLICE_SECONDS
    return items


class EventStream(Response):
    """The answers as server-sent events. Closes `answer_stream` after the last event, or when the client disconnects.

    A small model produces tens of thousands of events per second, so the work per event is kept short.

    Args:
        seconds: time limit for all answers; 0: none.
    """

    media_type = "text/event-stream"

    def __init__(self, answer_stream: AnswerStream, builder: ResponseBuilder, seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer_stream, self._builder = answer_stream, builder
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await cancel_on_disconnect(self._send_answers(scope.get(STREAM_SEND, send)), receive):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answer_stream.close()

    async def _send_answers(self, send: Send) -> bool:
        """Send the events of the answers; the last ones report the error after a failure."""
        answer_stream, events = self._answer_stream, self._builder.events
        try:
            if begin := self._builder.begin():
                await send({"type": "http.response.body", "body": begin, "more_body": True})
            async with time_limit(self._seconds):
                while deltas := await answer_stream.next():
                    body = events(deltas[0]) if len(deltas) == 1 else b"".join(map(events, deltas))
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            last = self._builder.end()
        except Exception as error:
            answer_stream.close()  # before the final event is sent, which may block on a slow client
            last = self._builder.failure(api_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": True})
        return True


@contextlib.asynccontextmanager
async def time_limit(seconds: float, sentence: str = _ANSWER_TIMEOUT) -> AsyncIterator[None]:
    """Raise ApiError 504 with `sentence` in the body after `request_timeout` seconds; 0: no limit."""
    try:
        async with asyncio.timeout(seconds or None):
            yield
    except TimeoutError:
        raise ApiError(504, sentence.format(seconds), code="timeout") from None


async def read_chat(to_chat: Callable[[], ChatRequest], request: Request) -> ChatRequest:
    """The chat request that a body of another API stands for, of which a long one is translated on a thread."""
    length = header(request.scope, b"content-length")
    return await on_thread(int(length[:20]) if length.isdigit() else LONG_BODY + 1, to_chat)


async def unless_disconnected(work: Coroutine[Any, Any, Value], request: Request, takes_long: bool = False) -> Value:
    """Return the result of `work`, which ends early if the client disconnects. The body of `request` has been read.

    Args:
        takes_long: however short the body is.

    Raises:
        ApiError: the client disconnected.
    """
    length = header(request.scope, b"content-length")
    if not takes_long and length.isdigit() and int(length[:20]) <= _LONG_BODY:
        return await work  # short work: a task for it would cost as much
    result = await cancel_on_disconnect(work, request.receive)
    if result is None:
        raise ApiError(CLIENT_CLOSED_REQUEST, "The client has disconnected.")
    return result
