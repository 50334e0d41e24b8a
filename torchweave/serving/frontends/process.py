"""An HTTP process other than the first: answers generation requests, and proxies all others to the first process."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.control.errors import fault_of
from torchweave.serving.control import HANDLERS
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.frontends import messages
from torchweave.serving.http.app import create_app
from torchweave.serving.http.listener import UvicornServer, join
from torchweave.serving.ipc import messages as wire
from torchweave.serving.ipc import socket_stream
from torchweave.serving.ipc.processes import Silence, critical_task
from torchweave.serving.ipc.shared_load import SharedLoad
from torchweave.serving.ipc.socket_stream import Sender
from torchweave.serving.service import Service
from torchweave.utils import gc
from torchweave.utils.child_process import exit_with_parent

_log = logging.getLogger("torchweave")


def main(config: EngineConfig, settings: ServerConfig, frontend_info: messages.FrontendInfo) -> None:
    """Serve until the first HTTP process ends this process, or ends itself."""
    exit_with_parent(partial(shutil.rmtree, frontend_info.folder, ignore_errors=True))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    frontend = Frontend(config, settings, frontend_info)
    with frontend.uvicorn.runner() as runner:
        runner.run(frontend.run())


class Frontend:
    """The server of this process.

    Attributes:
        uvicorn: listens at the server's address once the engines take requests.
    """

    def __init__(self, config: EngineConfig, settings: ServerConfig, frontend_info: messages.FrontendInfo) -> None:
        self._frontend_info = frontend_info
        count = settings.data_parallel_size
        shared_load = SharedLoad(count, frontend_info.count, frontend_info.shared_load_fd)
        frontend_context = FrontendContext(frontend_info.number, frontend_info.life, shared_load, announce=self._send)
        self._engines = [
            SharedEngineClient(wire.ReplicaInfo(index, count, frontend_info.count), frontend_context)
            for index in range(count)
        ]
        client = Replicas(config, self._engines, frontend_context, opened=frontend_info.life > 0)
        self._app = create_app(client, settings, wait=True, primary_socket=frontend_info.proxy_socket)
        self._service: Service = self._app.state.service
        self.uvicorn = UvicornServer(self._app, settings.max_connections_per_address)
        self._to_first = Sender(frontend_info.to_first)
        self._silence_of_first = Silence()

    async def run(self) -> None:
        with socket_stream.listen(self._frontend_info.from_first) as from_first:
            reading = critical_task(
                socket_stream.read(from_first, lambda message: self._on_message(messages.decode_to_frontend(message)))
            )
            reporting = critical_task(self._report_listening())
            timeout = self._service.settings.engine_timeout
            watching = critical_task(self._end_first_if_silent(timeout)) if timeout else reporting
            try:
                await self.uvicorn.serve(sockets=[join(self._frontend_info.host, self._frontend_info.port)])
            finally:
                reading.cancel()
                reporting.cancel()
                watching.cancel()
                self._to_first.close(0)

    async def _report_listening(self) -> None:
        """Report to the first process that this one listens, or why its start failed; the first process then ends it."""
        await self.uvicorn.listening.wait()
        service = self._service
        if service.startup_ok:
            self._send(messages.FrontendReady())
        elif service.client.state != "stopped":  # otherwise the server is shutting down
            self._send(messages.FrontendFailed(service.startup_error or service.client.failure))
        with gc.gc_frozen_manual_collect():
            await asyncio.Event().wait()

    async def _end_first_if_silent(self, timeout: float) -> None:
        """Kill the first process, and with it the server, if it sends nothing, not even pings: no request would be answered."""
        await self.uvicorn.listening.wait()
        while self._silence_of_first.seconds <= timeout:
            await self._silence_of_first.wait()
        first = os.getppid()
        _log.critical(
            "HTTP process 0 of the server (process %d) has not answered for %g s; the server ends.", first, timeout
        )
        os.kill(first, signal.SIGKILL)

    def _on_message(self, message: messages.ToFrontend) -> None:
        self._silence_of_first.end()
        if isinstance(message, messages.MetricsRequest):
            request_metrics = [engine.request_metrics for engine in self._engines]
            http = self._app.state.http
            metrics = messages.FrontendMetrics(message.number, request_metrics, http.requests, http.warnings.by_kind)
            self._send(metrics)
        elif isinstance(message, wire.PromptRouted):
            self._service.client.on_prompt_routed(message)
        elif isinstance(message, messages.Draining):
            self._service.draining = True
        elif isinstance(message, messages.Call):
            self._send(self._answer(message))
        elif isinstance(message, messages.Ping):
            self._send(messages.Pong())
        elif isinstance(message, messages.End):
            self.uvicorn.should_exit = True
        else:
            self._engines[message.engine].on_engine_message(message)

    def _answer(self, call: messages.Call) -> messages.Answer:
        try:
            HANDLERS[call.name](self._service, call.arguments, call.results)
        except Exception as error:
            return messages.Answer(call.number, fault_of(error))
        return messages.Answer(call.number)

    def _send(self, message: messages.FromFrontend) -> None:
        self._to_first.send(wire.encode(message))


class SharedEngineClient(EngineClient):
    """Client of an engine whose process the first HTTP process starts, watches and ends."""

    _life_task: asyncio.Task[None] | None = None
    _process_exit: asyncio.Future[None] | None = None
    _why = ""

    async def start(self) -> None:
        """Set `state` to `starting` until the first process reports otherwise; it may have done so already."""
        if self.state == "stopped":
            self.state = "starting"

    async def stop(self, at_once: bool = False) -> None:
        """Disconnect from the engine; requests in flight get an error."""
        if self._life_task is not None:
            self._life_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._life_task
        self._fail_all(self.failure or "The server is shutting down.")

    def on_engine_message(self, message: wire.EngineStarted | wire.EngineStateChanged | wire.EngineExited) -> None:
        """Handle the first process's report about this engine."""
        if isinstance(message, wire.EngineStarted):
            before, self._process_exit = self._life_task, asyncio.get_running_loop().create_future()
            self._life_task = critical_task(self._follow_life(message.addresses, self._process_exit, before))
        elif isinstance(message, wire.EngineStateChanged):
            self.state, self.failure, self.restarts, self.model = (
                message.state, message.failure, message.restarts, message.model,
            )  # fmt: skip
            self._changed.set()
        elif self._process_exit is not None and not self._process_exit.done():
            self._why = message.why
            self._process_exit.set_result(None)

    async def _follow_life(
        self, addresses: wire.Addresses, process_exit: asyncio.Future[None], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        if not Path(addresses.folder).exists():  # the engine process ended before this process could connect
            await process_exit
        else:
            with self._open_sockets(addresses) as from_engine:
                await self._read_messages_until(process_exit, from_engine)
        self._fail_all(self._why or self.failure)
        if not process_exit.done():  # the engine runs on, but its messages cannot be read here any more
            raise RuntimeError(self.failure)
