"""An engine as an HTTP process sees it that did not start it: the first one tells of its life."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.frontends.messages import Became, Began, Ended
from torchweave.serving.ipc.messages import Addresses
from torchweave.serving.ipc.processes import vital


class SharedEngine(EngineClient):
    """A client of an engine that another process starts, watches and ends."""

    _life: asyncio.Task[None] | None = None
    _ended: asyncio.Future[None] | None = None
    _why = ""

    async def start(self) -> None:
        """It is starting, as far as is known."""
        self.state = "starting"

    async def stop(self, at_once: bool = False) -> None:
        """Hear no more of it; requests in flight are answered with an error."""
        if self._life is not None:
            self._life.cancel()
            with suppress(asyncio.CancelledError):
                await self._life
        self._refuse_all(self.failure or "The server is shutting down.")

    def tell(self, message: Began | Became | Ended) -> None:
        """Take in what the first HTTP process says of this engine."""
        if isinstance(message, Began):
            before, self._ended = self._life, asyncio.get_running_loop().create_future()
            self._life = vital(self._live(message.addresses, self._ended, before))
        elif isinstance(message, Became):
            self.state, self.failure, self.restarts, self.model = (
                message.state, message.failure, message.restarts, message.model,
            )  # fmt: skip
            self._changed.set()
        elif self._ended is not None and not self._ended.done():
            self._why = message.why
            self._ended.set_result(None)

    async def _live(self, addresses: Addresses, ended: asyncio.Future[None], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        if not Path(addresses.folder).exists():  # that life was over before this process heard of it
            await ended
        else:
            with self._sockets(addresses) as from_engine:
                await self._hear_until(ended, from_engine)
        self._refuse_all(self._why or self.failure)
        if not ended.done():  # the engine goes on, and nobody here would hear it
            raise RuntimeError(self.failure)
