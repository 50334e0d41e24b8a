"""An engine as an HTTP process sees it that did not start it: the first one tells of its life."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.ipc.messages import Addresses, EngineExited, EngineStarted, EngineStateChanged
from torchweave.serving.ipc.processes import critical_task


class SharedEngineClient(EngineClient):
    """A client of an engine that another process starts, watches and ends."""

    _life_task: asyncio.Task[None] | None = None
    _process_exit: asyncio.Future[None] | None = None
    _why = ""

    async def start(self) -> None:
        """It is starting, as far as is known."""
        self.state = "starting"

    async def stop(self, at_once: bool = False) -> None:
        """Hear no more of it; requests in flight are answered with an error."""
        if self._life_task is not None:
            self._life_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._life_task
        self._fail_all(self.failure or "The server is shutting down.")

    def on_engine_message(self, message: EngineStarted | EngineStateChanged | EngineExited) -> None:
        """Take in what the first HTTP process says of this engine."""
        if isinstance(message, EngineStarted):
            before, self._process_exit = self._life_task, asyncio.get_running_loop().create_future()
            self._life_task = critical_task(self._follow_life(message.addresses, self._process_exit, before))
        elif isinstance(message, EngineStateChanged):
            self.state, self.failure, self.restarts, self.model = (
                message.state, message.failure, message.restarts, message.model,
            )  # fmt: skip
            self._changed.set()
        elif self._process_exit is not None and not self._process_exit.done():
            self._why = message.why
            self._process_exit.set_result(None)

    async def _follow_life(
        self, addresses: Addresses, process_exit: asyncio.Future[None], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        if not Path(addresses.folder).exists():  # that life was over before this process heard of it
            await process_exit
        else:
            with self._open_sockets(addresses) as from_engine:
                await self._read_messages_until(process_exit, from_engine)
        self._fail_all(self._why or self.failure)
        if not process_exit.done():  # the engine goes on, and nobody here would hear it
            raise RuntimeError(self.failure)
