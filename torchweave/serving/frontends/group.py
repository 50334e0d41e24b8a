"""The HTTP processes beside the first one, as the first one sees them."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.context import SpawnProcess
from typing import cast

import zmq
import zmq.asyncio

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import EngineClient, Side
from torchweave.serving.engine_client.load_balancer import Sent
from torchweave.serving.frontends.messages import CannotServe, End, FromFrontend, Joined, Look, Seat, Seen, ToFrontend
from torchweave.serving.ipc.processes import bury, ended, meeting_place, spawn, vital
from torchweave.serving.ipc.shared_load import Ledger
from torchweave.serving.metrics.prometheus import HttpCounts
from torchweave.utils import gc

_LOOK_SECONDS = 1.0  # in which the others say what they have seen; who is later is shown as he was
_END_SECONDS = 7.0  # for the others to end by themselves


class Frontends:
    """Starts the others, tells them of the engines, and asks them what they have seen.

    Args:
        count: HTTP processes, the first one among them; with 1 nothing happens here.
        side: of the first.

    Attributes:
        failure: why the server cannot go on; empty while all are there.
    """

    def __init__(self, count: int, side: Side) -> None:
        self.failure = ""
        self._count, self._side = count, side
        self._processes: dict[int, SpawnProcess] = {}
        self._to: dict[int, zmq.Socket[bytes]] = {}
        self._joined: set[int] = set()
        self._seen: dict[int, Seen] = {}
        self._looks = 0
        self._next_news: asyncio.Future[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._stopping = False
        self._things = ExitStack()  # sockets, and the folder in which they lie

    def start(
        self, config: EngineConfig, settings: ServerConfig, address: tuple[str, int], learn: Callable[[Sent], None]
    ) -> list[socket.socket]:
        """Start the others, which will listen at `address` too once the engines are ready.

        Args:
            learn: called with each prompt that one of them gives to an engine.

        Returns:
            Where the first one has to listen as well: the others hand on what is about the whole server.
        """
        if self._count == 1:
            return []
        self._side.announce = self.announce
        folder = meeting_place()
        self._things.callback(shutil.rmtree, folder, ignore_errors=True)
        seats = [Seat(number, self._count, folder, *address) for number in range(1, self._count)]
        relay = socket.socket(socket.AF_UNIX)
        relay.bind(seats[0].relay)
        context = zmq.asyncio.Context()
        self._things.callback(context.term)  # would wait for a socket that is open
        heard = context.socket(zmq.PULL)
        self._things.callback(heard.close, linger=0)
        heard.setsockopt(zmq.RCVHWM, 0)
        heard.bind(seats[0].to_first)
        self._reading = vital(self._read(heard, learn))
        for seat in seats:
            to = self._to[seat.number] = zmq.Context.shadow(context).socket(zmq.PUSH)
            self._things.callback(to.close, linger=0)
            to.setsockopt(zmq.SNDHWM, 0)
            to.connect(seat.from_first)
            name = f"tw-http-{seat.number}"
            process = spawn(_run, config, settings, seat, self._side.ledger, name=name)
            self._processes[seat.number] = process
            self._watching.append(asyncio.create_task(self._watch(process)))
        return [relay]

    def announce(self, message: ToFrontend, but: int = 0) -> None:
        """Tell all of the others, `but` for the one that has said it."""
        text = pickle.dumps(message)
        for number, to in self._to.items():
            if number != but:
                to.send(text, zmq.NOBLOCK)

    async def joined(self) -> None:
        """Wait until all of them listen, or one is gone."""
        while len(self._joined) < len(self._processes) and not self.failure:
            await self._news()

    async def look(self, engines: Sequence[EngineClient], http: HttpCounts) -> None:
        """Bring up to date what is known of the requests of the others."""
        self._looks = number = self._looks + 1
        self.announce(Look(number))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                while any(each not in self._seen or self._seen[each].number < number for each in self._joined):
                    await self._news()
        for engine in engines:
            engine.traffic_elsewhere = [seen.traffics[engine.place.index] for seen in self._seen.values()]
        http.elsewhere = [seen.http for seen in self._seen.values()]

    async def stop(self, at_once: bool = False) -> None:
        """End them: when they have written what they have to write, or at once."""
        self._stopping = True
        self.announce(End())
        if self._watching and not at_once and len(self._joined) == len(self._processes):
            await asyncio.wait(self._watching, timeout=_END_SECONDS)
        for process in self._processes.values():
            await asyncio.to_thread(bury, process)
        await asyncio.gather(*self._watching)
        if self._reading is not None:
            self._reading.cancel()
        self._to.clear()  # the engines may still have something to tell, and nobody is left who would hear it
        self._things.close()

    async def _news(self) -> None:
        """Wait until one of them has said something, or is gone."""
        news = self._next_news = self._next_news or asyncio.get_running_loop().create_future()
        await asyncio.shield(news)

    def _tell_news(self) -> None:
        if self._next_news is not None:
            self._next_news.set_result(None)
            self._next_news = None

    async def _read(self, heard: zmq.asyncio.Socket, learn: Callable[[Sent], None]) -> None:
        while True:
            number, message = cast(tuple[int, FromFrontend], pickle.loads(await heard.recv()))
            if isinstance(message, Sent):
                learn(message)
                self.announce(message, but=number)
                continue
            if isinstance(message, Joined):
                self._joined.add(number)
            elif isinstance(message, CannotServe):
                self._fail(message.why or "An HTTP process of the server could not begin.")
            else:
                self._seen[number] = message
            self._tell_news()

    async def _watch(self, process: SpawnProcess) -> None:
        await ended(process)
        if not self._stopping:
            self._fail("An HTTP process of the server ended unexpectedly.")
        self._tell_news()

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._side.changed.set()


def _run(config: EngineConfig, settings: ServerConfig, seat: Seat, ledger: Ledger) -> None:
    with gc.for_good():
        from torchweave.serving.frontends.process import main  # all that a server is made of
    main(config, settings, seat, ledger)
