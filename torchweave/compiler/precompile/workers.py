"""Processes that build Triton kernels: a build takes up to some seconds, and would share the GIL with the compilation.

One process imports the modules and forks a child for each kernel. It is started as a command instead of by
`multiprocessing`, for the reason given in `torchweave.utils.child_process`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any

from torchweave.compiler.precompile.kernel_jobs import BuiltKernel, KernelSpec
from torchweave.utils.child_process import ChildProcess

_MAX_PARALLEL_BUILDS = 16
_TIMEOUT_SECONDS = 120.0  # kernels still missing then are built at their first launch
_ENDED = "the process that builds kernels has exited"


class KernelWorkers:
    """Builds kernels; the exit of its `with` terminates the processes.

    Args:
        most: kernels to build in parallel.
    """

    def __init__(self, most: int = _MAX_PARALLEL_BUILDS) -> None:
        self._connection, child_end = Pipe()
        most = max(min(most, len(os.sched_getaffinity(0))), 1)
        with child_end:
            self._process = ChildProcess(
                main, child_end.fileno(), most, pass_fds=[child_end.fileno()], stdout=subprocess.DEVNULL
            )
        self._requested: dict[int, tuple[KernelSpec, Future[str | None]]] = {}
        self._finished = 0  # number of requests that `finish` has waited for
        threading.Thread(target=self._receive, name="torchweave-kernel-workers", daemon=True).start()

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def begin(self, kernel_specs: Iterable[KernelSpec]) -> None:
        """Begin to build kernels; each is installed when it is complete."""
        for spec in kernel_specs:
            number = len(self._requested)
            self._requested[number] = spec, Future()
            try:
                self._connection.send((number, spec))
            except OSError:
                self._complete(number, _ENDED)

    def finish(self) -> list[str]:
        """Wait for all kernels begun since the last call. Returns the reasons of failures."""
        futures = [self._requested[number][1] for number in range(self._finished, len(self._requested))]
        self._finished = len(self._requested)
        done, late = wait(futures, _TIMEOUT_SECONDS)
        return [
            *filter(None, (each.result() for each in done)),
            *[f"it was not complete after {_TIMEOUT_SECONDS:.0f} s"] * len(late),
        ]

    def _receive(self) -> None:
        try:
            while True:
                self._complete(*self._connection.recv())
        except (EOFError, OSError):
            for number in list(self._requested):
                self._complete(number, _ENDED)

    def _complete(self, number: int, result: BuiltKernel | str) -> None:
        spec, future = self._requested[number]
        failure = result if isinstance(result, str) else None
        if isinstance(result, BuiltKernel):
            try:
                spec.install(result)
            except Exception as error:  # of reading files, and of later versions of Triton
                failure = f"{spec.name}: {type(error).__name__}: {error}"
        with contextlib.suppress(InvalidStateError):  # it was completed when the process exited
            future.set_result(failure)


def main(fd: int, most: int) -> None:
    """Main function of the process: build the kernels that arrive over a connection, each in a fork, until it is closed."""
    from triton.runtime.cache import triton_key

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent process
    gc.disable()  # every fork builds one kernel and exits
    triton_key()  # computed once, not in every fork
    waiting: deque[tuple[int, KernelSpec]] = deque()
    running: dict[Connection, int] = {}
    with Connection(fd) as leader, contextlib.suppress(EOFError, ConnectionError):  # the parent closed it, or has ended
        while True:
            while waiting and len(running) < most:
                number, spec = waiting.popleft()
                running[_fork(spec)] = number
            ready = wait_for_any([leader, *running])
            for connection in [each for each in running if each in ready]:
                leader.send((running.pop(connection), _result(connection)))
            if leader in ready:
                waiting.append(leader.recv())
                waiting[-1][1].kernel()  # likewise imported and hashed once


def _fork(spec: KernelSpec) -> Connection:
    """Build a kernel in a forked process; returns the connection that receives the result."""
    receiver, sender = Pipe(duplex=False)
    if os.fork() == 0:
        try:
            sender.send(spec.build())
        except BaseException as error:
            sender.send(f"{spec.name}: {type(error).__name__}: {error}")
        finally:
            os._exit(0)
    sender.close()
    return receiver


def _result(connection: Connection) -> BuiltKernel | str:
    with connection:
        try:
            return connection.recv()
        except EOFError:
            return "the process that built it has exited"
        finally:
            os.wait()
