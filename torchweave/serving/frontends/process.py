"""One of the HTTP processes beside the first: it reads requests for answers, asks the engines, and writes the answers."""

from __future__ import annotations

import asyncio
import logging
import pickle

import zmq
import zmq.asyncio

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import Side
from torchweave.serving.engine_client.load_balancer import Sent
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.frontends.messages import (
    CannotServe,
    Draining,
    End,
    FromFrontend,
    Joined,
    Look,
    Seat,
    Seen,
    ToFrontend,
)
from torchweave.serving.frontends.shared_engine import SharedEngine
from torchweave.serving.http.app import create_app
from torchweave.serving.http.listener import Uvicorn, join
from torchweave.serving.ipc.messages import Place
from torchweave.serving.ipc.processes import follow_parent, vital
from torchweave.serving.ipc.shared_load import Ledger
from torchweave.serving.service import Service
from torchweave.utils import gc


def main(config: EngineConfig, settings: ServerConfig, seat: Seat, ledger: Ledger) -> None:
    """Serve until the first HTTP process says otherwise, or ends."""
    follow_parent(seat.folder)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    frontend = Frontend(config, settings, seat, ledger)
    with frontend.uvicorn.runner() as runner:
        runner.run(frontend.run())


class Frontend:
    """The server as far as this process has it.

    Attributes:
        uvicorn: that listens where the first one does, once the engines take requests.
    """

    def __init__(self, config: EngineConfig, settings: ServerConfig, seat: Seat, ledger: Ledger) -> None:
        self._seat = seat
        side = Side(seat.number, ledger, announce=self._say)
        count = settings.data_parallel_size
        self._engines = [SharedEngine(Place(index, count, seat.count), side) for index in range(count)]
        client = Replicas(config, self._engines, side)
        self._app = create_app(client, settings, wait=True, first=seat.relay)
        self._service: Service = self._app.state.service
        self.uvicorn = Uvicorn(self._app)
        self._context = zmq.asyncio.Context()
        self._to_first = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        self._from_first = self._context.socket(zmq.PULL)

    async def run(self) -> None:
        self._from_first.setsockopt(zmq.RCVHWM, 0)
        self._from_first.bind(self._seat.from_first)
        self._to_first.connect(self._seat.to_first)
        tasks = [vital(self._hear()), vital(self._open())]
        try:
            await self.uvicorn.serve(sockets=[join(self._seat.host, self._seat.port)])
        finally:
            for task in tasks:
                task.cancel()
            self._to_first.close(linger=0)
            self._from_first.close(linger=0)
            self._context.term()

    async def _open(self) -> None:
        """Tell the first one when this one listens, or why it does so in vain; the first one ends it."""
        await self.uvicorn.listening.wait()
        service = self._service
        if service.begun:
            self._say(Joined())
        elif service.client.state != "stopped":  # else the server ends already
            self._say(CannotServe(service.fault or service.client.failure))
        with gc.at_rest_by_turns():
            await asyncio.Event().wait()

    async def _hear(self) -> None:
        while True:
            self._take(pickle.loads(await self._from_first.recv()))

    def _take(self, message: ToFrontend) -> None:
        if isinstance(message, Look):
            traffics = tuple(engine.traffic for engine in self._engines)
            self._say(Seen(message.number, traffics, self._app.state.http.requests))
        elif isinstance(message, Sent):
            self._service.client.learn(message)
        elif isinstance(message, Draining):
            self._service.draining = True
        elif isinstance(message, End):
            self.uvicorn.should_exit = True
        else:
            self._engines[message.engine].tell(message)

    def _say(self, message: FromFrontend) -> None:
        self._to_first.send(pickle.dumps((self._seat.number, message)), zmq.NOBLOCK)
