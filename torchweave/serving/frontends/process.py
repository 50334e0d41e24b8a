"""One of the HTTP processes beside the first: it reads requests for answers, asks the engines, and writes the answers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.frontends.messages import (
    Draining,
    End,
    FromFrontend,
    FrontendFailed,
    FrontendInfo,
    FrontendMetrics,
    FrontendReady,
    MetricsRequest,
    ToFrontend,
    decode_to_frontend,
)
from torchweave.serving.http.app import create_app
from torchweave.serving.http.listener import UvicornServer, join
from torchweave.serving.ipc import socket_stream
from torchweave.serving.ipc.messages import (
    Addresses,
    EngineExited,
    EngineStarted,
    EngineStateChanged,
    PromptRouted,
    ReplicaInfo,
    encode,
)
from torchweave.serving.ipc.processes import critical_task, exit_with_parent
from torchweave.serving.ipc.shared_load import SharedLoad
from torchweave.serving.ipc.socket_stream import Sender
from torchweave.serving.service import Service
from torchweave.utils import gc


def main(config: EngineConfig, settings: ServerConfig, frontend_info: FrontendInfo, shared_load: SharedLoad) -> None:
    """Serve until the first HTTP process says otherwise, or ends."""
    exit_with_parent(frontend_info.folder)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    frontend = Frontend(config, settings, frontend_info, shared_load)
    with frontend.uvicorn.runner() as runner:
        runner.run(frontend.run())


class Frontend:
    """The server as far as this process has it.

    Attributes:
        uvicorn: that listens where the first one does, once the engines take requests.
    """

    def __init__(
        self, config: EngineConfig, settings: ServerConfig, frontend_info: FrontendInfo, shared_load: SharedLoad
    ) -> None:
        self._frontend_info = frontend_info
        frontend_context = FrontendContext(frontend_info.number, shared_load, announce=self._send)
        count = settings.data_parallel_size
        self._engines = [
            SharedEngineClient(ReplicaInfo(index, count, frontend_info.count), frontend_context)
            for index in range(count)
        ]
        client = Replicas(config, self._engines, frontend_context)
        self._app = create_app(client, settings, wait=True, primary_socket=frontend_info.proxy_socket)
        self._service: Service = self._app.state.service
        self.uvicorn = UvicornServer(self._app)
        self._to_first = Sender(frontend_info.to_first)

    async def run(self) -> None:
        with socket_stream.listen(self._frontend_info.from_first) as from_first:
            reading = critical_task(
                socket_stream.read(from_first, lambda message: self._on_message(decode_to_frontend(message)))
            )
            reporting = critical_task(self._report_listening())
            try:
                await self.uvicorn.serve(sockets=[join(self._frontend_info.host, self._frontend_info.port)])
            finally:
                reading.cancel()
                reporting.cancel()
                self._to_first.close(0)

    async def _report_listening(self) -> None:
        """Tell the first one when this one listens, or why it does so in vain; the first one ends it."""
        await self.uvicorn.listening.wait()
        service = self._service
        if service.startup_ok:
            self._send(FrontendReady())
        elif service.client.state != "stopped":  # else the server ends already
            self._send(FrontendFailed(service.startup_error or service.client.failure))
        with gc.gc_frozen_manual_collect():
            await asyncio.Event().wait()

    def _on_message(self, message: ToFrontend) -> None:
        if isinstance(message, MetricsRequest):
            request_metrics = [engine.request_metrics for engine in self._engines]
            self._send(FrontendMetrics(message.number, request_metrics, self._app.state.http.requests))
        elif isinstance(message, PromptRouted):
            self._service.client.on_prompt_routed(message)
        elif isinstance(message, Draining):
            self._service.draining = True
        elif isinstance(message, End):
            self.uvicorn.should_exit = True
        else:
            self._engines[message.engine].on_engine_message(message)

    def _send(self, message: FromFrontend) -> None:
        self._to_first.send(encode(message))


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
