"""The first HTTP process's handle on the other HTTP processes."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.control.errors import Fault, joined
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.frontends import messages
from torchweave.serving.ipc import socket_stream
from torchweave.serving.ipc.messages import PromptRouted, encode
from torchweave.serving.ipc.processes import PING_SECONDS, Silence, critical_task, make_socket_dir, process_exit, spawn
from torchweave.serving.ipc.socket_stream import Sender
from torchweave.serving.metrics.prometheus import HttpRequestCounters
from torchweave.utils import gc
from torchweave.utils.child_process import ChildProcess

_POLL_TIMEOUT_SECONDS = 1.0  # for the others' metrics; a process that is later is shown with its previous ones
_END_SECONDS = 7.0  # for the others to end by themselves


class FrontendGroup:
    """Starts and ends the other HTTP processes, reports the engines' states to them, and polls their metrics.

    Args:
        count: number of HTTP processes, including the first; with 1 this object does nothing.
        frontend_context: of the first process.

    Attributes:
        failure: why the server has to end; empty while all processes run.
    """

    def __init__(self, count: int, frontend_context: FrontendContext) -> None:
        self.failure = ""
        self._count, self._frontend_context = count, frontend_context
        self._processes: dict[int, ChildProcess] = {}
        self._to_frontends: dict[int, Sender] = {}
        self._joined: set[int] = set()
        self._frontend_metrics: dict[int, messages.FrontendMetrics] = {}
        self._num_polls = self._num_calls = 0
        self._answers: dict[int, dict[int, Fault | None]] = {}  # of calls by their numbers, by process
        self._arrived = asyncio.Event()  # a process has sent a message or ended
        self._read_tasks: list[asyncio.Task[None]] = []
        self._ping_tasks: list[asyncio.Task[None]] = []
        self._watch_tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._silence_of = {number: Silence() for number in range(1, count)}
        self._exit_stack = ExitStack()  # sockets, and the folder in which they lie

    def start(
        self,
        config: EngineConfig,
        settings: ServerConfig,
        address: tuple[str, int],
        on_prompt_routed: Callable[[PromptRouted], None],
    ) -> list[socket.socket]:
        """Start the others, which listen at `address` once the engines are ready.

        Args:
            on_prompt_routed: called with each prompt that another process sends to an engine.

        Returns:
            Additional sockets for the first process: the others proxy requests about the whole server there.
        """
        if self._count == 1:
            return []
        self._frontend_context.announce = self.announce
        folder = make_socket_dir()
        self._exit_stack.callback(shutil.rmtree, folder, ignore_errors=True)
        fd = self._frontend_context.shared_load.fd
        frontend_infos = [
            messages.FrontendInfo(number, self._count, folder, *address, fd) for number in range(1, self._count)
        ]
        proxy_socket = socket.socket(socket.AF_UNIX)
        proxy_socket.bind(frontend_infos[0].proxy_socket)
        for frontend_info in frontend_infos:
            from_frontend = self._exit_stack.enter_context(socket_stream.listen(frontend_info.to_first))
            self._read_tasks.append(critical_task(self._read(from_frontend, frontend_info.number, on_prompt_routed)))
            to_frontend = self._to_frontends[frontend_info.number] = Sender(frontend_info.from_first)
            self._exit_stack.callback(to_frontend.close, 0)
            name = f"tw-http-{frontend_info.number}"
            process = spawn(_run, config, settings, frontend_info, name=name, pass_fds=[frontend_info.shared_load_fd])
            self._processes[frontend_info.number] = process
            self._watch_tasks.append(asyncio.create_task(self._watch(frontend_info.number, process)))
            if settings.engine_timeout:
                ending = self._end_if_silent(frontend_info.number, process, settings.engine_timeout)
                self._ping_tasks.append(critical_task(ending))
        return [proxy_socket]

    def announce(self, message: messages.ToFrontend, exclude: int = 0) -> None:
        """Send a message to all other processes except number `exclude`."""
        encoded = encode(message)
        for number, to_frontend in self._to_frontends.items():
            if number != exclude:
                to_frontend.send(encoded)

    async def joined(self) -> None:
        """Wait until all processes listen, or one has failed."""
        while len(self._joined) < len(self._processes) and not self.failure:
            await self._wait_for_message()

    async def poll_metrics(self, engines: Sequence[EngineClient], http: HttpRequestCounters) -> None:
        """Update `remote_request_metrics` and `http.remote` from the other processes."""
        self._num_polls = number = self._num_polls + 1
        self.announce(messages.MetricsRequest(number))
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_TIMEOUT_SECONDS):
                while any(
                    each not in self._frontend_metrics or self._frontend_metrics[each].number < number
                    for each in self._joined
                ):
                    await self._wait_for_message()
        for engine in engines:
            engine.remote_request_metrics = [
                metrics.request_metrics[engine.replica_info.index] for metrics in self._frontend_metrics.values()
            ]
        http.remote = [Counter(metrics.http) for metrics in self._frontend_metrics.values()]
        http.warnings.remote = [Counter(metrics.warnings) for metrics in self._frontend_metrics.values()]

    async def call(self, name: str, arguments: dict[str, Any], results: Sequence[Any]) -> None:
        """Run the handler of a control call in the other processes.

        Raises:
            ControlError: it failed in a process, which the message names.
        """
        self._num_calls = number = self._num_calls + 1
        answers = self._answers[number] = {}
        self.announce(messages.Call(number, name, arguments, list(results)))
        try:
            while len(answers) < len(self._joined) and not self.failure:
                await self._wait_for_message()
        finally:
            del self._answers[number]
        if faults := {f"HTTP process {each}": fault for each, fault in answers.items() if fault is not None}:
            raise joined(faults)

    async def stop(self, at_once: bool = False) -> None:
        """End the processes after their last responses, or `at_once`."""
        self._stopping = True
        for task in self._ping_tasks:
            task.cancel()
        self.announce(messages.End())
        if self._watch_tasks and not at_once and len(self._joined) == len(self._processes):
            await asyncio.wait(self._watch_tasks, timeout=_END_SECONDS)
        for process in self._processes.values():
            await asyncio.to_thread(process.kill_and_wait)
        await asyncio.gather(*self._watch_tasks)
        for task in self._read_tasks:
            task.cancel()
        self._to_frontends.clear()  # engines may still announce state changes
        self._exit_stack.close()

    async def _wait_for_message(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    async def _read(
        self, from_frontend: socket.socket, number: int, on_prompt_routed: Callable[[PromptRouted], None]
    ) -> None:
        def on_message(encoded: bytes) -> None:
            message: messages.FromFrontend = messages.decode_from_frontend(encoded)
            self._silence_of[number].end()
            if isinstance(message, messages.Pong):
                return
            if isinstance(message, PromptRouted):
                on_prompt_routed(message)
                self.announce(message, exclude=number)
                return
            if isinstance(message, messages.FrontendReady):
                self._joined.add(number)
            elif isinstance(message, messages.Answer):
                if (answers := self._answers.get(message.number)) is not None:
                    answers[number] = message.fault
            elif isinstance(message, messages.FrontendFailed):
                self._fail(message.why or "An HTTP process of the server could not start.")
            else:
                self._frontend_metrics[number] = message
            self._arrived.set()

        await socket_stream.read(from_frontend, on_message)

    async def _watch(self, number: int, process: ChildProcess) -> None:
        await process_exit(process)
        if not self._stopping:
            reason = await asyncio.to_thread(process.exit_text)
            name = f"HTTP process {number} of the server (process {process.pid})"
            self._fail(f"{name} ended unexpectedly{f' ({reason})' if reason else ''}.")
        self._arrived.set()

    async def _end_if_silent(self, number: int, process: ChildProcess, timeout: float) -> None:
        """Kill a process that has listened and then sends nothing, not even answers to pings: it would hold its connections."""
        while number not in self._joined:
            await asyncio.sleep(PING_SECONDS)
        silence = self._silence_of[number]
        while True:
            await silence.wait()
            if silence.seconds > timeout:
                name = f"HTTP process {number} of the server (process {process.pid})"
                self._fail(f"{name} has not answered for {timeout:g} s.")
                process.kill()
                return
            self._to_frontends[number].send(encode(messages.Ping()))

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._frontend_context.changed.set()


def _run(config: EngineConfig, settings: ServerConfig, frontend_info: messages.FrontendInfo) -> None:
    with gc.gc_frozen_after():
        from torchweave.serving.frontends.process import main  # imports the whole server
    main(config, settings, frontend_info)
