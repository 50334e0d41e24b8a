"""The requests of one caller in the HTTP process, and what the engine says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from torchweave.engine.request import SamplingParams
from torchweave.engine.responses import Response

Mail = Response | tuple[int, int]
"""What the engine says of a request: a response, or in short its number and one more token, for each stream in each step."""


class EngineGone(RuntimeError):
    """The engine is not there: it is starting, it failed, or it was ended."""


class RequestFailed(ValueError):
    """The engine could not go on with a request, and goes on with the others."""


class Engines(Protocol):
    """Whom requests are handed to."""

    def submit(
        self,
        flight: Flight,
        prompt: np.ndarray,
        params: SamplingParams,
        streaming: bool,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int: ...

    def cancel(self, ids: Sequence[int], whole: bool = False) -> None: ...


class Flight:
    """The requests of one caller. Leaving its `with` block cancels those that are not done."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._open: set[int] = set()
        self._unheard: set[int] = set()  # of which the engine has not said whether it can run them
        self._refusal = ""
        self._gone = ""  # why the engine is gone
        self._mail: list[Mail] = []
        self._waiting: asyncio.Future[None] | None = None

    def submit(
        self, prompt: np.ndarray, params: SamplingParams, streaming: bool, priority: int = 0, cache_salt: str = ""
    ) -> int:
        """Hand in a request, which gets one answer (whatever `n`); returns its id.

        Raises:
            EngineGone: the engine is not ready.
        """
        request_id = self._engines.submit(self, prompt, params, streaming, priority, cache_salt)
        self._open.add(request_id)
        self._unheard.add(request_id)
        return request_id

    async def accepted(self) -> None:
        """Wait until the engine has said of every request that it can run it.

        Raises:
            ValueError: it cannot; the message says why and what to do.
            EngineGone: it ended.
        """
        while self._unheard and not self._gone:
            await self._wait()
        if self._gone:
            raise EngineGone(self._gone)
        if self._refusal:
            raise ValueError(self._refusal)

    async def mail(self) -> list[Mail]:
        """All that came since the last time, as soon as something has; nothing once every request had its final response.

        Raises:
            EngineGone: the engine failed or was ended.
            RequestFailed: a request failed alone.
        """
        while self._open and not self._mail:
            await self._wait()
        mail, self._mail = self._mail, []
        for each in mail:
            if isinstance(each, Response):
                if each.final:
                    self._open.discard(each.id)
                if each.error:
                    raise EngineGone(each.error) if self._gone else RequestFailed(each.error)
        return mail

    def stop(self, request_id: int) -> None:
        """Stop one request, whose answer is whole; its final response still comes."""
        self._engines.cancel([request_id], whole=True)

    def close(self) -> None:
        """Stop all that is not done, and hear no more of it."""
        if self._open:
            self._engines.cancel(list(self._open))
        self._open.clear()

    async def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()  # an asyncio.Event takes three times as long
        await self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- called by the client ------------------------------------------------------------------------------------------

    def accept(self, request_id: int, refusal: str) -> None:
        """The engine can run a request, or says why not."""
        self._unheard.discard(request_id)
        if refusal:
            self._open.discard(request_id)
            self._refusal = refusal
        self._wake()

    def hear(self, mail: Mail, gone: bool = False) -> None:
        """Something of a request; `gone`: an error in it is that of the engine, which ends."""
        if gone and isinstance(mail, Response) and mail.error:
            self._gone = mail.error
        if mail[0] in self._open:
            self._mail.append(mail)
        self._wake()

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
