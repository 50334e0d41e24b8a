"""Ranks as processes of this machine: fresh interpreters, never forks, so that no CUDA state is shared by accident.

They are started as commands rather than by `multiprocessing`, which would run the user's script again in each of them: a
script without `if __name__ == "__main__"`, a notebook and an interactive session work as they are.

What a rank imports takes it seconds, and what it is to do is known later: so it is started first, and waits for its task.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

from torchweave.distributed import channel
from torchweave.distributed.channel import Channel
from torchweave.distributed.gpu_context import open_gpu_context
from torchweave.utils import gc

_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd}, {function!r}, {gpu})"
_EXIT_WAIT_SECONDS = 2.0  # for a process whose connection has ended to end too


class LocalWorker:
    """A rank that this process has started."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], peer_channel: Channel) -> None:
        self.peer_channel = peer_channel
        self.name = f"Rank {rank} (process {process.pid})"
        self._process = process

    def exit_reason(self) -> str:
        self.wait(_EXIT_WAIT_SECONDS)
        code = self._process.poll()
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        self._process.kill()  # which a stopped process cannot escape either
        self._process.wait()


class WorkerPool:
    """Ranks that are on their way: each imports what it will run and then waits for its task. `with` ends those that got none.

    Args:
        function: what a rank calls with its link and its task, as `module:name`.
        count: how many to start now.
        gpu: number of the leader's GPU, where those of the others follow, and which they open while they import; None: none.
    """

    def __init__(self, function: str, count: int = 0, gpu: int | None = None) -> None:
        self._function, self._gpu = function, gpu
        self._workers: list[LocalWorker] = []
        self._spawn(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.peer_channel.abort()
            worker.kill()
        self._workers.clear()

    def assign(self, tasks: Sequence[Any]) -> list[LocalWorker]:
        """The ranks 1, 2, ..., each with its task: those that wait, and new ones where they are too few."""
        with self:
            self._spawn(len(tasks))
            for worker, task in zip(self._workers, tasks, strict=False):
                with contextlib.suppress(OSError):  # it has ended, which whoever listens to it will hear
                    worker.peer_channel.send(channel.TASK, pickle.dumps(task))
            assigned = self._workers[: len(tasks)]
            self._workers = self._workers[len(tasks) :]
        return assigned

    def _spawn(self, count: int) -> None:
        """Start ranks until there are so many."""
        try:
            while len(self._workers) < count:
                rank = len(self._workers) + 1
                self._workers.append(_spawn(rank, self._function, None if self._gpu is None else self._gpu + rank))
        except BaseException:
            self.__exit__()
            raise


def _spawn(rank: int, function: str, gpu: int | None) -> LocalWorker:
    ours, theirs = Pipe()
    code = _BOOTSTRAP.format(module=__name__, path=sys.path, fd=theirs.fileno(), function=function, gpu=gpu)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the leader, who ends them
    )
    theirs.close()
    return LocalWorker(rank, process, Channel(ours))


def main(fd: int, function: str, gpu: int | None) -> None:
    """What a started process runs: it imports, and then does the task that comes first over its connection."""
    peer_channel = Channel(Connection(fd))
    if gpu is not None:
        open_gpu_context(gpu)
    with gc.gc_frozen_after():
        run = resolve_function(function)
    try:
        kind, payload = peer_channel.receive()
    except (EOFError, OSError):  # the leader has ended, or needs no ranks
        os._exit(1)
    assert kind == channel.TASK
    run(peer_channel, pickle.loads(payload))


def resolve_function(function: str) -> Any:
    """What `module:name` names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
