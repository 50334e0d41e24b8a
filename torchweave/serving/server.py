"""The server's life cycle: socket, signals, drain and exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import FrontendContext
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.frontends.group import FrontendGroup
from torchweave.serving.http.app import create_app
from torchweave.serving.http.listener import UvicornServer, listen, listen_at, num_http_processes, tls_options
from torchweave.serving.ipc.processes import critical_task
from torchweave.serving.ipc.shared_load import SharedLoad
from torchweave.serving.service import Service
from torchweave.utils import gc
from torchweave.utils.signals import reset_after_next

_FAILED_SECONDS = 1.0  # for clients to receive the engine's failure
_POLL_SECONDS = 0.05  # of the requests in flight during the drain


class Server:
    """Serves one engine, or replicas of it, until a signal or the failure of the last one.

    Args:
        config: of each engine.
        on_ready: called with the server when it takes requests.

    Attributes:
        url: address of the server.

    Raises:
        ValueError: the address is invalid or in use.
    """

    def __init__(
        self, config: EngineConfig, settings: ServerConfig, on_ready: Callable[[Server], None] = lambda _: None
    ) -> None:
        tls = tls_options(settings)
        count = num_http_processes(settings.api_server_count, one_address=bool(tls) or settings.uds is not None)
        self._config, self._settings, self._on_ready = config, settings, on_ready
        if settings.uds is not None:
            self._socket, self._port = listen_at(settings.uds), 0
            self.url = f"unix:{settings.uds}"
        else:
            self._socket = listen(settings.host, settings.port, shared=count > 1)
            self._port = self._socket.getsockname()[1]
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self.url = f"{'https' if tls else 'http'}://{host}:{self._port}"
        frontend_context = FrontendContext(shared_load=SharedLoad(settings.data_parallel_size, count))
        self._frontends = FrontendGroup(count, frontend_context)
        self.client = create_replicas(
            config,
            settings.data_parallel_size,
            settings.restart_engine,
            frontend_context,
            count,
            settings.engine_timeout,
        )
        self.app = create_app(self.client, settings, poll_remote_metrics=self._frontends.poll_metrics)
        self.service: Service = self.app.state.service
        self.service.call_other_frontends = self._frontends.call
        self._draining: asyncio.Task[None] | None = None
        self._uvicorn = UvicornServer(self.app, settings.max_connections_per_address, **tls)

    @property
    def failure(self) -> str:
        """Why the server failed or could not start; empty otherwise."""
        if self.client.state == "failed":  # may have caused the failure of the HTTP processes
            return self.client.failure
        return self._frontends.failure or self.client.failure

    def run(self) -> int:
        """Serve; returns the exit code: 0 after a signal, 1 if the engine failed.

        Raises:
            ValueError: an option or the model is invalid; the message says why and what to do.
        """
        with self._uvicorn.runner() as runner:
            return runner.run(self._serve())

    async def _serve(self) -> int:
        self._handle_signals()
        address = self._settings.host, self._port
        extra_sockets = self._frontends.start(self._config, self._settings, address, self.client)
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket, *extra_sockets]))
        tasks = [asyncio.create_task(self._report_ready()), critical_task(self._watch_engines())]
        await serving
        tasks += [] if self._draining is None else [self._draining]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        at_once = self._uvicorn.force_exit
        if at_once:  # uvicorn then skips the application's shutdown
            await self.client.stop(at_once)
            await self._uvicorn.lifespan.shutdown()
        await self._frontends.stop(at_once)
        if self.service.startup_error:
            raise ValueError(self.service.startup_error)
        return 1 if self.client.state == "failed" or self._frontends.failure else 0

    def _handle_signals(self) -> None:
        """Drain at a signal. Should the event loop be stuck, so that nothing happens, a second signal ends the process."""
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, self._on_signal)
            reset_after_next(each)

    def _on_signal(self) -> None:
        self._handle_signals()
        self.drain()

    async def _report_ready(self) -> None:
        """Call `on_ready` when the server is ready, or end the server if its start failed."""
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
        """End the server when its engines or one of its HTTP processes have ended, also during the start."""
        startup_done = self.service.startup_done
        await self.client.wait_for(
            lambda: bool(self._frontends.failure) or (startup_done.is_set() and not self.client.alive)
        )
        if self._frontends.failure:
            await self.client.stop()  # requests in flight get an error, in all HTTP processes
        if self.failure:
            await asyncio.sleep(_FAILED_SECONDS)
        self._uvicorn.should_exit = True

    def drain(self) -> None:
        """Refuse new requests and end when the running ones have finished; on a second call, end at once."""
        if self._draining is not None or not self.service.ready:
            self._uvicorn.should_exit = True
            self._uvicorn.force_exit = self._draining is not None
            return
        self.service.draining = True
        self._frontends.drain()
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                while self.client.num_in_flight:
                    await asyncio.sleep(_POLL_SECONDS)
        await self.client.stop()  # the remaining requests get an error
        self._uvicorn.should_exit = True
