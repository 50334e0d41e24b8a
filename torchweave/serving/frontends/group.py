"""The first HTTP process's handle on the other HTTP processes."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import socket
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.control.errors import Fault, joined
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.engine_client.replicas import Replicas
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
_MAX_ENDS, _ENDS_SECONDS = 5, 60.0  # unexpected ends within this time, after which no process is started again
_START_SECONDS = 300.0  # for a process that was started again to listen, before it counts as silent
_log = logging.getLogger("torchweave")


class FrontendGroup:
    """Starts, watches and ends the other HTTP processes, reports the engines' states to them, and polls their metrics.

    Args:
        count: number of HTTP processes, including the first; with 1 this object does nothing.
        frontend_context: of the first process.

    Attributes:
        failure: why the server has to end; empty while all processes run.
    """

    def __init__(self, count: int, frontend_context: FrontendContext) -> None:
        self.failure = ""
        self._count, self._frontend_context = count, frontend_context
        self._infos: dict[int, messages.FrontendInfo] = {}
        self._processes: dict[int, ChildProcess] = {}
        self._to_frontends: dict[int, Sender] = {}
        self._joined: set[int] = set()
        self._frontend_metrics: dict[int, messages.FrontendMetrics] = {}
        self._ended_metrics: messages.FrontendMetrics | None = None  # counters of processes that have ended
        self._num_polls = self._num_calls = 0
        self._answers: dict[int, dict[int, Fault | None]] = {}  # of calls by their numbers, by process
        self._adapter_calls: dict[str, messages.Call] = {}  # the last for each adapter, for processes that start later
        self._arrived = asyncio.Event()  # a process has sent a message or ended
        self._read_tasks: list[asyncio.Task[None]] = []
        self._watch_tasks: list[asyncio.Task[None]] = []
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._draining = self._stopping = False
        self._silence_of = {number: Silence() for number in range(1, count)}
        self._exit_stack = ExitStack()  # sockets, and the folder in which they lie

    def start(
        self,
        config: EngineConfig,
        settings: ServerConfig,
        address: tuple[str, int],
        replicas: Replicas,
    ) -> list[socket.socket]:
        """Start the others, which listen at `address` once the engines are ready. One that ends later is started again.

        Args:
            replicas: of the first process: hear of each prompt that another process sends to an engine, and of its end.

        Returns:
            Additional sockets for the first process: the others proxy requests about the whole server there.
        """
        if self._count == 1:
            return []
        self._config, self._settings, self._replicas = config, settings, replicas
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
            self._infos[frontend_info.number] = frontend_info
            from_frontend = self._exit_stack.enter_context(socket_stream.listen(frontend_info.to_first))
            self._read_tasks.append(critical_task(self._read(from_frontend, frontend_info.number)))
            self._spawn(frontend_info)
            self._watch_tasks.append(critical_task(self._keep_running(frontend_info.number)))
        return [proxy_socket]

    def _spawn(self, frontend_info: messages.FrontendInfo) -> None:
        number = frontend_info.number
        self._to_frontends[number] = Sender(frontend_info.from_first)
        self._processes[number] = spawn(
            _run,
            self._config,
            self._settings,
            frontend_info,
            name=f"tw-http-{number}",
            pass_fds=[frontend_info.shared_load_fd],
        )

    def drain(self) -> None:
        """The server takes no further requests, and starts no process again."""
        self._draining = True
        self.announce(messages.Draining())

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
        known = [*self._frontend_metrics.values(), *([] if self._ended_metrics is None else [self._ended_metrics])]
        for engine in engines:
            engine.remote_request_metrics = [metrics.request_metrics[engine.replica_info.index] for metrics in known]
        http.remote = [Counter(metrics.http) for metrics in known]
        http.warnings.remote = [Counter(metrics.warnings) for metrics in known]

    async def call(self, name: str, arguments: dict[str, Any], results: Sequence[Any]) -> None:
        """Run the handler of a control call in the other processes.

        Raises:
            ControlError: it failed in a process, which the message names.
        """
        self._num_calls = number = self._num_calls + 1
        answers = self._answers[number] = {}
        message = messages.Call(number, name, arguments, list(results))
        if "adapter" in arguments:
            self._adapter_calls[arguments["adapter"]] = message
        self.announce(message)
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
        self.announce(messages.End())
        if self._watch_tasks and not at_once and len(self._joined) == len(self._processes):
            await asyncio.wait(self._watch_tasks, timeout=_END_SECONDS)
        for process in self._processes.values():
            await asyncio.to_thread(process.kill_and_wait)
        await asyncio.gather(*self._watch_tasks)
        for task in self._read_tasks:
            task.cancel()
        for to_frontend in self._to_frontends.values():
            to_frontend.close(0)
        self._to_frontends.clear()  # engines may still announce state changes
        self._exit_stack.close()

    async def _wait_for_message(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    async def _read(self, listening: socket.socket, number: int) -> None:
        """Read the messages of each process that has the number, one after the other."""

        def on_message(encoded: bytes) -> None:
            message: messages.FromFrontend = messages.decode_from_frontend(encoded)
            self._silence_of[number].end()
            if isinstance(message, messages.Pong):
                return
            if isinstance(message, PromptRouted):
                self._replicas.on_prompt_routed(message)
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

        while True:
            await socket_stream.read(listening, on_message)

    async def _keep_running(self, number: int) -> None:
        """Start a process again that ends, until the server does. The end of one that starts with the server, and too many, are
        a failure."""
        while True:
            why = await self._end_of(number, self._processes[number])
            if self._stopping:
                break
            self._ends.append(asyncio.get_running_loop().time())
            too_many = len(self._ends) == _MAX_ENDS and self._ends[-1] - self._ends[0] < _ENDS_SECONDS
            starts_with_server = number not in self._joined and not self._infos[number].life
            if starts_with_server or too_many:
                self._fail(why)
                break
            info = self._infos[number] = replace(self._infos[number], life=self._infos[number].life + 1)
            self._leave(number)
            known = self._replicas.replace_frontend(number, info.life)
            if self._draining:
                break
            _log.warning("%s It is started again.", why)
            self._spawn(info)
            for message in (*known, *self._adapter_calls.values()):
                self._to_frontends[number].send(encode(message))
            self._arrived.set()
        self._arrived.set()

    async def _end_of(self, number: int, process: ChildProcess) -> str:
        """Wait until a process has ended; returns why, in a sentence. One that does not answer is killed."""
        name = f"HTTP process {number} of the server (process {process.pid})"
        ending, timeout = process_exit(process), self._settings.engine_timeout
        silent = critical_task(self._until_silent(number, timeout or math.inf))
        await asyncio.wait([ending, silent], return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            process.kill()
            await ending
            return f"{name} has not answered for {timeout:g} s."
        silent.cancel()
        reason = await asyncio.to_thread(process.exit_text)
        return f"{name} ended unexpectedly{f' ({reason})' if reason else ''}."

    async def _until_silent(self, number: int, seconds: float) -> None:
        """Wait until a process that has listened sends nothing, not even answers to pings: it would hold its connections."""
        passed = 0.0
        while number not in self._joined and (passed < _START_SECONDS or not self._infos[number].life):
            await asyncio.sleep(PING_SECONDS)
            passed += PING_SECONDS
        silence = self._silence_of[number] = Silence()
        while silence.seconds <= seconds or self._stopping:
            await silence.wait()
            self._to_frontends[number].send(encode(messages.Ping()))

    def _leave(self, number: int) -> None:
        """Forget a process that has ended, but for what it has counted."""
        self._joined.discard(number)
        self._to_frontends.pop(number).close(0)
        last = self._frontend_metrics.pop(number, None)
        if last is not None:
            self._ended_metrics = last.ended(self._ended_metrics)

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._frontend_context.changed.set()


def _run(config: EngineConfig, settings: ServerConfig, frontend_info: messages.FrontendInfo) -> None:
    with gc.gc_frozen_after():
        from torchweave.serving.frontends.process import main  # imports the whole server
    main(config, settings, frontend_info)
