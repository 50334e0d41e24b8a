"""Responses of generation requests, full or streamed, with a time limit; canceled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from torchweave.serving.errors import ApiError, api_error
from torchweave.serving.http.middleware import CLIENT_CLOSED_REQUEST, STREAM_SEND, Receive, Send, header
from torchweave.serving.openai.generation import AnswerStream
from torchweave.serving.openai.response_builders import ResponseBuilder
from torchweave.serving.service import service_of

Value = TypeVar("Value")
_LONG_BODY = 1 << 16  # bytes


async def respond(request: Request, stream: bool, answer_stream: AnswerStream, builder: ResponseBuilder) -> Response:
    """The response of a request: its answers as they come, or in one body.

    Raises:
        ApiError, EngineUnavailable: see `full_response`.
    """
    seconds = service_of(request).settings.request_timeout
    if stream:
        return EventStream(answer_stream, builder, seconds)
    return await full_response(answer_stream, builder, request.receive, seconds)


async def full_response(
    answer_stream: AnswerStream, builder: ResponseBuilder, receive: Receive, seconds: float
) -> Response:
    """Wait for all answers and return them in one body.

    Raises:
        ApiError: 504 after `seconds` (0: no limit).
        EngineUnavailable: the engine ended.
    """
    try:
        async with asyncio.timeout(seconds or None):
            answers = await cancel_on_disconnect(answer_stream.full(), receive)
    except TimeoutError:
        raise timeout_error(seconds) from None
    finally:
        answer_stream.close()
    if answers is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(msgspec.json.encode(builder.full(answers)), media_type="application/json")


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
        send_part = scope.get(STREAM_SEND, send)

        async def send_all() -> bool:
            last = await self._send_answers(send_part)
            await send_part({"type": "http.response.body", "body": last, "more_body": True})
            return True

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await cancel_on_disconnect(send_all(), receive):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answer_stream.close()

    async def _send_answers(self, send: Send) -> bytes:
        """Send the events of the answers; returns the last events, which report the error after a failure."""
        answer_stream, events = self._answer_stream, self._builder.events
        try:
            if begin := self._builder.begin():
                await send({"type": "http.response.body", "body": begin, "more_body": True})
            async with asyncio.timeout(self._seconds or None):
                while deltas := await answer_stream.next():
                    body = events(deltas[0]) if len(deltas) == 1 else b"".join(map(events, deltas))
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            return self._builder.end()
        except Exception as error:
            answer_stream.close()  # before the final event is sent, which may block on a slow client
            timed_out = isinstance(error, TimeoutError)
            return self._builder.failure(timeout_error(self._seconds) if timed_out else api_error(error))


def timeout_error(seconds: float) -> ApiError:
    """The error of a request that took longer than `request_timeout`."""
    sentence = (
        f"The answer took longer than the {seconds:g} seconds that this server allows per request; lower max_tokens."
    )
    return ApiError(504, sentence, code="timeout")


async def cancel_on_disconnect(work: Coroutine[Any, Any, Value], receive: Receive) -> Value | None:
    """Return the result of `work`, or None if the client disconnects first."""
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def unless_disconnected(work: Coroutine[Any, Any, Value], request: Request, has_images: bool = False) -> Value:
    """Return the result of `work`, which ends early if the client disconnects. The body of `request` has been read.

    Args:
        has_images: the work takes long, however short the body is.

    Raises:
        ApiError: the client disconnected.
    """
    length = header(request.scope, b"content-length")
    if (
        not has_images and length.isdigit() and int(length[:20]) <= _LONG_BODY
    ):  # soon done, and a task for each costs as much
        return await work
    result = await cancel_on_disconnect(work, request.receive)
    if result is None:
        raise ApiError(CLIENT_CLOSED_REQUEST, "The client has disconnected.")
    return result


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
