"""Starts, watches and restarts an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from functools import partial

from torchweave.config.options import EngineConfig
from torchweave.engine.startup.early_start import prestart_workers
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.ipc import messages
from torchweave.serving.ipc.processes import make_socket_dir, process_exit, spawn
from torchweave.serving.ipc.shared_load import SharedLoad
from torchweave.utils import gc
from torchweave.utils.child_process import ChildProcess, exit_with_parent

_END_SECONDS = 5.0  # for the engine process to end by itself
_PING_SECONDS = 1.0


class EngineSupervisor(EngineClient):
    """Client of an engine whose process it starts and ends.

    Args:
        restart: restart the engine if it fails after it was ready.
        timeout: seconds without an answer after which the engine counts as hung and is killed; 0: never.
    """

    def __init__(
        self,
        config: EngineConfig,
        restart: bool = False,
        replica_info: messages.ReplicaInfo = messages.ReplicaInfo(),  # noqa: B008
        frontend_context: FrontendContext | None = None,
        timeout: float = 0.0,
    ) -> None:
        super().__init__(replica_info, frontend_context or FrontendContext())
        self._config = config
        self._restart = restart
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None
        self._process: ChildProcess | None = None

    async def start(self) -> None:
        """Start the engine process; returns at once."""
        assert self._task is None, "start was called twice"
        self.state = "starting"
        self._task = asyncio.create_task(self._supervise())

    async def stop(self, at_once: bool = False) -> None:
        """End the engine process; requests in flight get an error."""
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

    async def _supervise(self) -> None:
        """Run the engine process, and with `restart` run it again after each failure."""
        while self.state == "starting":
            async with contextlib.AsyncExitStack() as exit_stack:
                try:
                    await self._run_process(exit_stack)
                except Exception as error:
                    self.failure = f"The engine process could not be run: {type(error).__name__}: {error}"
                self._on_process_exit()

    async def _run_process(self, exit_stack: contextlib.AsyncExitStack) -> None:
        """Start the engine process and return when it has ended; `exit_stack` closes its sockets."""
        folder = make_socket_dir()
        exit_stack.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = messages.Addresses(folder)
        from_engine = exit_stack.enter_context(self._open_sockets(addresses))
        self._frontend_context.announce(messages.EngineStarted(self.replica_info.index, addresses))
        self._events.clear()
        self._progress_bars.clear()
        self._record_event(0.0, "progress", messages.PROCESS_START_PROGRESS)
        name = f"tw-engine-{self.replica_info.index}"
        self._process = spawn(_run_engine, self._config, addresses, self.replica_info, name=name)
        exit_stack.push_async_callback(asyncio.to_thread, self._process.kill_and_wait)
        if self._timeout:
            exit_stack.callback(asyncio.create_task(self._end_if_silent(self._process)).cancel)
        await self._read_messages_until(process_exit(self._process), from_engine)

    async def _end_if_silent(self, process: ChildProcess) -> None:
        """Kill an engine that was ready and then sends nothing, not even answers to pings."""
        while True:
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(_PING_SECONDS)
            if self.state != "ready":
                self._silent_seconds = 0.0
                continue
            # At most: this process may have been stopped itself.
            self._silent_seconds += min(asyncio.get_running_loop().time() - before, 2 * _PING_SECONDS)
            if self._silent_seconds > self._timeout:
                self.failure = f"The engine process has not answered for {self._timeout:g} s."
                process.kill()
                return
            self._send(messages.Ping())

    def _on_ready(self, message: messages.Ready) -> None:
        super()._on_ready(message)
        self._announce_state()

    def _on_process_exit(self) -> None:
        """Fail the requests in flight before the process's memory is released, then set `state` to `starting` or `failed`."""
        self.model = None
        self._prior_cache_tokens, self.stats = self.prefix_cache_tokens, {}  # counters stay, gauges return to 0
        why, was_ready = self.failure or "The engine process ended unexpectedly.", self.state == "ready"
        self._fail_all(why)
        if was_ready and self._restart:
            self.restarts += 1
            self.state, self.failure = "starting", ""
        elif self.state != "stopped":
            self.state, self.failure = "failed", why
        self._announce_state()
        self._frontend_context.announce(messages.EngineExited(self.replica_info.index, why))
        if was_ready:
            self._notify_listeners("engine_ended", {"why": why, "restarts": self.state == "starting"})
        self._changed.set()

    def _announce_state(self) -> None:
        self._frontend_context.announce(self.state_message)


def _run_engine(config: EngineConfig, addresses: messages.Addresses, replica_info: messages.ReplicaInfo) -> None:
    exit_with_parent(partial(shutil.rmtree, addresses.folder, ignore_errors=True))  # before imports, which take seconds
    with prestart_workers(config, replica_info.index) as worker_pool:
        with gc.gc_frozen_after():
            from torchweave.serving.engine_process import main  # torch is imported in that process
        main(config, addresses, replica_info, worker_pool)


def create_replicas(
    config: EngineConfig,
    count: int = 1,
    restart: bool = False,
    frontend_context: FrontendContext | None = None,
    frontends: int = 1,
    timeout: float = 0.0,
) -> Replicas:
    """Create `count` replicas for `frontends` HTTP processes. For the other arguments see `EngineSupervisor`."""
    frontend_context = frontend_context or FrontendContext(shared_load=SharedLoad(count, frontends))
    replica_infos = (messages.ReplicaInfo(index, count, frontends) for index in range(count))
    return Replicas(
        config,
        [EngineSupervisor(config, restart, replica_info, frontend_context, timeout) for replica_info in replica_infos],
        frontend_context,
    )
