"""One server from its start to its end: the socket, the signals, the drain, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from torchweave import collector
from torchweave.config import EngineConfig, ServerConfig
from torchweave.serving.app import create_app
from torchweave.serving.replicas import Replicas
from torchweave.serving.service import Service

_CLOSE_SECONDS = 5  # for connections to take in what was said to them last
_FAILED_SECONDS = 1.0  # for those who ask to hear that the engine has failed
_KEEP_ALIVE_SECONDS = 75  # longer than what proxies keep their end open


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: a signal begins the drain, it does not close the door."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        self._socket = _listen(settings.host, settings.port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self.client = Replicas(config, settings.data_parallel_size, settings.restart_engine)
        self.app = create_app(self.client, settings)
        self.service: Service = self.app.state.service
        self._settings = settings
        self._on_ready = on_ready
        self._draining: asyncio.Task[None] | None = None
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self.app,
                http="httptools",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )

    def run(self) -> int:
        """Serve; returns the exit code: 0 after a signal, 1 when the engine failed.

        Raises:
            ValueError: the engine cannot be what was asked; one sentence says why and what to do.
        """
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            return runner.run(self._serve())

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.drain)
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        following = asyncio.create_task(self._follow())
        await serving
        following.cancel()
        if self.service.fault:
            raise ValueError(self.service.fault)
        return 1 if self.client.state == "failed" else 0

    async def _follow(self) -> None:
        """Tell when the server is ready, and end it with its engine."""
        await self.service.opened.wait()
        if self.service.ready:
            self._on_ready(self)
        else:
            self._uvicorn.should_exit = True
        with collector.at_rest_by_turns():
            await self.client.wait_for(lambda: not self.client.alive)
        if self.client.state == "failed":
            await asyncio.sleep(_FAILED_SECONDS)
        self._uvicorn.should_exit = True

    def drain(self) -> None:
        """Take no more requests and end when those that run have finished; called again: now."""
        if self._draining is not None or not self.service.ready:
            self._uvicorn.should_exit = True
            self._uvicorn.force_exit = self._draining is not None
            return
        self.service.draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                await self.client.wait_for(lambda: self.client.num_in_flight == 0)
        await self.client.stop()  # whoever is still there hears of it
        self._uvicorn.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} must be from 0 to 65535; 0 takes one that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be listened on: {error.strerror}; choose another host or port"
        ) from None
    return found
