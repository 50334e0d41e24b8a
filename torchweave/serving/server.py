"""One server from its start to its end: the socket, the signals, the drain, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import FrontendContext
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.frontends.group import FrontendGroup
from torchweave.serving.frontends.messages import Draining
from torchweave.serving.http.app import create_app
from torchweave.serving.http.listener import UvicornServer, listen, num_http_processes
from torchweave.serving.ipc.processes import critical_task
from torchweave.serving.ipc.shared_load import SharedLoad
from torchweave.serving.service import Service
from torchweave.utils import gc

_FAILED_SECONDS = 1.0  # for those who ask to hear that the engine has failed
_POLL_SECONDS = 0.05  # between two looks at what other HTTP processes have in flight, while they finish it


class Server:
    """Serves one engine, or replicas of it, until a signal or the end of the last one.

    Args:
        config: of each engine.
        settings: of the server.
        on_ready: called with the server when it takes requests.

    Attributes:
        url: where it listens.

    Raises:
        ValueError: the address cannot be had.
    """

    def __init__(
        self, config: EngineConfig, settings: ServerConfig, on_ready: Callable[[Server], None] = lambda _: None
    ) -> None:
        count = num_http_processes(settings.api_server_count)
        self._config, self._settings, self._on_ready = config, settings, on_ready
        self._socket = listen(settings.host, settings.port, shared=count > 1)
        self._port: int = self._socket.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self._port}"
        frontend_context = FrontendContext(shared_load=SharedLoad(settings.data_parallel_size, count))
        self._frontends = FrontendGroup(count, frontend_context)
        self.client = create_replicas(
            config, settings.data_parallel_size, settings.restart_engine, frontend_context, count
        )
        self.app = create_app(self.client, settings, poll_remote_metrics=self._frontends.poll_metrics)
        self.service: Service = self.app.state.service
        self._draining: asyncio.Task[None] | None = None
        self._uvicorn = UvicornServer(self.app)

    @property
    def failure(self) -> str:
        """Why it cannot go on, or has not begun; empty while it can."""
        if self.client.state == "failed":  # what else is amiss may be so for that
            return self.client.failure
        return self._frontends.failure or self.client.failure

    def run(self) -> int:
        """Serve; returns the exit code: 0 after a signal, 1 when the engine failed.

        Raises:
            ValueError: the engine cannot be what was asked; one sentence says why and what to do.
        """
        with self._uvicorn.runner() as runner:
            return runner.run(self._serve())

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.drain)
        address = self._settings.host, self._port
        extra_sockets = self._frontends.start(self._config, self._settings, address, self.client.on_prompt_routed)
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket, *extra_sockets]))
        tasks = [asyncio.create_task(self._report_ready()), critical_task(self._watch_engines())]
        await serving
        await _cancel(*tasks, *([self._draining] if self._draining is not None else []))
        at_once = self._uvicorn.force_exit
        if at_once:  # uvicorn has left requests and application as they were, to be cancelled with the loop
            await self.client.stop(at_once)
            await self._uvicorn.lifespan.shutdown()
        await self._frontends.stop(at_once)
        if self.service.startup_error:
            raise ValueError(self.service.startup_error)
        return 1 if self.client.state == "failed" or self._frontends.failure else 0

    async def _report_ready(self) -> None:
        """Tell when the server is ready, or end it where it cannot be."""
        await self.service.startup_done.wait()
        if not self.service.ready:
            self._uvicorn.should_exit = True
            return
        await self._frontends.joined()
        if self._frontends.failure:
            return
        self._on_ready(self)
        with gc.gc_frozen_manual_collect():
            await asyncio.Event().wait()

    async def _watch_engines(self) -> None:
        """End the server with its engine, or with one of its HTTP processes, be it while it starts."""
        startup_done = self.service.startup_done
        await self.client.wait_for(
            lambda: bool(self._frontends.failure) or (startup_done.is_set() and not self.client.alive)
        )
        if self._frontends.failure:
            await self.client.stop()  # whoever waits for an answer hears of it, in all HTTP processes
        if self.failure:
            await asyncio.sleep(_FAILED_SECONDS)
        self._uvicorn.should_exit = True

    def drain(self) -> None:
        """Take no more requests and end when those that run have finished; called again: now."""
        if self._draining is not None or not self.service.ready:
            self._uvicorn.should_exit = True
            self._uvicorn.force_exit = self._draining is not None
            return
        self.service.draining = True
        self._frontends.announce(Draining())
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                while self.client.num_in_flight:
                    await asyncio.sleep(_POLL_SECONDS)
        await self.client.stop()  # whoever is still there hears of it
        self._uvicorn.should_exit = True


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
