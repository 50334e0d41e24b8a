"""An engine with its process, as the HTTP process sees it that starts it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from multiprocessing.context import SpawnProcess

from torchweave.config.options import EngineConfig
from torchweave.engine.startup.early_start import waiting_ranks
from torchweave.serving.engine_client.client import EngineClient, Side
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.frontends.messages import Became, Began, Ended
from torchweave.serving.ipc import messages
from torchweave.serving.ipc.processes import bury, ended, follow_parent, meeting_place, spawn
from torchweave.serving.ipc.shared_load import Ledger
from torchweave.utils import gc

_END_SECONDS = 5.0  # for the engine process to end by itself


class OwnEngine(EngineClient):
    """Starts the engine process, and is its client.

    Args:
        config: of the engine.
        restart: start the engine again when it fails after it was ready.
        place: which of the engines behind the server it is.
        side: this HTTP process.
    """

    def __init__(
        self,
        config: EngineConfig,
        restart: bool = False,
        place: messages.Place = messages.Place(),  # noqa: B008
        side: Side | None = None,
    ) -> None:
        super().__init__(place, side or Side())
        self._config = config
        self._restart = restart
        self._task: asyncio.Task[None] | None = None
        self._process: SpawnProcess | None = None

    async def start(self) -> None:
        """Start the engine process; returns at once."""
        assert self._task is None, "a client is started once"
        self.state = "starting"
        self._task = asyncio.create_task(self._live())

    async def stop(self, at_once: bool = False) -> None:
        """End the engine process; requests in flight are answered with an error."""
        if self._task is None or self._task.done():
            return
        if self.state in ("starting", "ready"):
            self.state, self.failure = "stopped", "The server is shutting down."
            self._announce_state()
        if self._process is not None and self._process.is_alive():
            if self.model is not None and not at_once:
                self._send(messages.End())
            else:
                self._process.kill()
        done, _ = await asyncio.wait([self._task], timeout=_END_SECONDS)
        if not done and self._process is not None:
            self._process.kill()
        await self._task

    async def _live(self) -> None:
        """From start to end, once or (with `restart`) again and again."""
        while self.state == "starting":
            async with contextlib.AsyncExitStack() as things:
                try:
                    await self._one_life(things)
                except Exception as error:
                    self.failure = f"The engine process could not be run: {type(error).__name__}: {error}"
                self._end_life()

    async def _one_life(self, things: contextlib.AsyncExitStack) -> None:
        """Until the engine process has ended; `things` closes what it was heard by."""
        folder = meeting_place()
        things.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = messages.Addresses(folder)
        from_engine = things.enter_context(self._sockets(addresses))
        self._side.announce(Began(self.place.index, addresses))
        self._events.clear()
        self._bars.clear()
        self._note(0.0, "progress", messages.PROCESS_BAR)
        name = f"tw-engine-{self.place.index}"
        self._process = spawn(_run_engine, self._config, addresses, self.place, name=name)
        things.push_async_callback(asyncio.to_thread, bury, self._process)
        await self._hear_until(ended(self._process), from_engine)

    def _open(self, message: messages.Ready) -> None:
        super()._open(message)
        self._announce_state()

    def _end_life(self) -> None:
        """Who waits for the engine hears that it is gone, before its memory is; then `state` says whether there is another life."""
        self.model = None
        self._looked_up_before, self._stats = self.looked_up, {}  # what it ran and held last, it does no more
        why, was_ready = self.failure or "The engine process ended unexpectedly.", self.state == "ready"
        self._refuse_all(why)
        if was_ready and self._restart:
            self.restarts += 1
            self.state, self.failure = "starting", ""
        elif self.state != "stopped":
            self.state, self.failure = "failed", why
        self._announce_state()
        self._side.announce(Ended(self.place.index, why))
        if was_ready:
            self._tell("engine_ended", {"why": why, "restarts": self.state == "starting"})
        self._changed.set()

    def _announce_state(self) -> None:
        self._side.announce(Became(self.place.index, self.state, self.failure, self.restarts, self.model))


def _run_engine(config: EngineConfig, addresses: messages.Addresses, place: messages.Place) -> None:
    follow_parent(addresses.folder)  # before imports, which take seconds
    with waiting_ranks(config, place.index) as waiting:
        with gc.for_good():
            from torchweave.serving.engine_process import main  # torch is imported in that process
        main(config, addresses, place, waiting)


def own_engines(
    config: EngineConfig,
    count: int = 1,
    restart: bool = False,
    side: Side | None = None,
    frontends: int = 1,
) -> Replicas:
    """Engines of this process: `count` replicas, which `frontends` HTTP processes ask. The other arguments are `OwnEngine`'s."""
    side = side or Side(ledger=Ledger(count, frontends))
    places = (messages.Place(index, count, frontends) for index in range(count))
    return Replicas(config, [OwnEngine(config, restart, place, side) for place in places], side)
