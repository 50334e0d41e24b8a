"""How an answer goes out: whole or as a stream of events, within a time limit, and only as long as somebody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi.responses import Response

from torchweave.serving.answers import Delta, Run
from torchweave.serving.errors import ApiError, api_error

Value = TypeVar("Value")
Receive = Callable[[], Awaitable[Any]]
_GONE = 499  # nginx's status for a client that left; nobody reads it but logs and metrics
_DONE = b"data: [DONE]\n\n"


class Reply(Protocol):
    """Turns the answers to one request into the bodies of its response."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Events of a stream for what is new of an answer."""
        ...

    def last_chunk(self) -> dict[str, Any]:
        """The event with the number of tokens."""
        ...

    def whole(self, answers: list[Delta]) -> dict[str, Any]:
        """The body of a response that is no stream."""
        ...


def as_response(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def answer_whole(run: Run, reply: Reply, receive: Receive, seconds: float) -> Response:
    """All answers in one body, once they have ended.

    Raises:
        ApiError: 504 when that takes longer than `seconds` (0: any time).
        EngineGone: the engine ended before.
    """
    try:
        answers = await _while_heard(_in_time(run.whole(), seconds), receive)
    finally:
        run.close()
    return Response(status_code=_GONE) if answers is None else as_response(reply.whole(answers))


def answer_stream(run: Run, reply: Reply, seconds: float, with_usage: bool) -> Response:
    """The answers as server-sent events, each as soon as it is there."""
    return EventStream(_events(run, reply, seconds, with_usage), run.close)


class EventStream(Response):
    """Server-sent events. `close` is called when the last one was sent, or the client has left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Any, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        async def pump() -> bool:
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            return True

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await _while_heard(pump(), receive):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()


async def _events(run: Run, reply: Reply, seconds: float, with_usage: bool) -> AsyncIterator[bytes]:
    """The bytes of all events; a fault on the way is an event too, since the status has been sent."""
    try:
        async with asyncio.timeout(seconds or None):
            async for deltas in run.deltas():
                events = [_event(chunk) for delta in deltas for chunk in reply.chunks(delta)]
                if events:
                    yield b"".join(events)
        yield (_event(reply.last_chunk()) if with_usage else b"") + _DONE
    except TimeoutError:
        yield _event(_too_slow(seconds).body) + _DONE
    except Exception as error:
        yield _event(api_error(error).body) + _DONE


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _in_time(work: Coroutine[Any, Any, Value], seconds: float) -> Value:
    try:
        async with asyncio.timeout(seconds or None):
            return await work
    except TimeoutError:
        raise _too_slow(seconds) from None


def _too_slow(seconds: float) -> ApiError:
    sentence = (
        f"The answer took longer than the {seconds:g} seconds that this server gives one request; lower max_tokens."
    )
    return ApiError(504, sentence, code="timeout")


async def _while_heard(work: Coroutine[Any, Any, Value], receive: Receive) -> Value | None:
    """The result of `work`, or None when the client left before."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
