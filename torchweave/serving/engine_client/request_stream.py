"""The engine requests of one HTTP request, and their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from torchweave.engine.request import InferenceRequest, Response

StreamOutput = Response | tuple[int, int]
"""A response, or (request id, token) for the one token of a stream in a step."""


class EngineUnavailable(RuntimeError):
    """The engine is starting, has failed, or was stopped."""


class RequestFailed(ValueError):
    """A request failed; the engine continues with the others."""


class Engines(Protocol):
    """One engine or several, as a stream uses them."""

    def submit(self, request_stream: RequestStream, request: InferenceRequest, /) -> int:
        """Submit a request whose responses go to `request_stream`; returns its id."""
        ...

    def cancel(self, ids: Sequence[int], by_stop_string: bool = False) -> None:
        """Cancel requests; those in flight still get their final response."""
        ...


class RequestStream:
    """The requests of one caller. Leaving its `with` block cancels the unfinished ones."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._open: set[int] = set()
        self._unaccepted: set[int] = set()  # neither accepted nor refused yet
        self._refusal = ""
        self._engine_failure = ""  # why the engine ended
        self._failure: EngineUnavailable | RequestFailed | None = None  # of a request
        self._pending_output: list[StreamOutput] = []
        self._wakeup: asyncio.Future[None] | None = None

    def submit(self, request: InferenceRequest) -> int:
        """Submit a request for one answer, regardless of `n`; returns the id that the engine's client gives it.

        Raises:
            EngineUnavailable: the engine is not ready.
        """
        request_id = self._engines.submit(self, request)
        self._open.add(request_id)
        self._unaccepted.add(request_id)
        return request_id

    async def wait_until_accepted(self) -> None:
        """Wait until the engine has accepted every request.

        Raises:
            ValueError: the engine refused a request; the message says why and what to do.
            EngineUnavailable: the engine ended.
        """
        while self._unaccepted and not self._engine_failure:
            await self._wait()
        if self._engine_failure:
            raise EngineUnavailable(self._engine_failure)
        if self._refusal:
            raise ValueError(self._refusal)

    async def new_output(self) -> list[StreamOutput]:
        """Wait for output and return all of it since the last call; empty after every request's final response.

        Raises:
            EngineUnavailable: the engine failed or was stopped.
            RequestFailed: a request failed.
        """
        while self._open and not self._pending_output:
            self._wakeup = asyncio.get_running_loop().create_future()  # no `_wait`: a frame for each token
            await self._wakeup
        if self._failure is not None:
            raise self._failure
        new_output, self._pending_output = self._pending_output, []
        return new_output

    def stop(self, request_id: int) -> None:
        """Stop a request whose answer is complete; its final response still arrives."""
        self._engines.cancel([request_id], by_stop_string=True)

    def close(self) -> None:
        """Cancel the unfinished requests and ignore their further outputs."""
        if self._open:
            self._engines.cancel(list(self._open))
        self._open.clear()

    async def _wait(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()  # asyncio.Event takes three times as long
        await self._wakeup

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    # -- called by the client ------------------------------------------------------------------------------------------

    def on_accepted(self, request_id: int, refusal: str) -> None:
        """Handle the engine's acceptance or refusal of a request."""
        self._unaccepted.discard(request_id)
        if refusal:
            self._open.discard(request_id)
            self._refusal = refusal
        self._wake()

    def on_output(self, new_output: StreamOutput, engine_failing: bool = False) -> None:
        """Handle an output of a request; `engine_failing`: an error in it is that of the engine, which ends."""
        if is_open := new_output[0] in self._open:
            self._pending_output.append(new_output)
        if isinstance(new_output, Response):
            if engine_failing and new_output.error:
                self._engine_failure = new_output.error
            if is_open and new_output.error:
                kind = EngineUnavailable if self._engine_failure else RequestFailed
                self._failure = kind(new_output.error)
            if new_output.final:
                self._open.discard(new_output.id)
        if (wakeup := self._wakeup) is not None and not wakeup.done():
            wakeup.set_result(None)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
