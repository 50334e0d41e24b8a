"""Ranks as child processes on this machine.

A rank is started before its task exists, since its imports take seconds: it imports and then waits for the task.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

from torchweave.distributed.gpu_context import open_gpu_context
from torchweave.distributed.worker_group import Channel, MessageKind
from torchweave.utils import gc
from torchweave.utils.child_process import ChildProcess


class LocalWorker:
    """A rank in a child process (`Worker`)."""

    def __init__(self, rank: int, process: ChildProcess, channel: Channel) -> None:
        self.channel = channel
        self.name = f"Rank {rank} (process {process.pid})"
        self.exit_reason = process.exit_text
        self.wait = process.wait
        self.kill = process.kill_and_wait


class WorkerPool:
    """Ranks that import the code of their task and wait for it. Leaving the context ends those without a task.

    Args:
        function: called in a rank with its channel and its task, as `module:name`.
        count: ranks to start now.
        gpu: index of the leader's GPU; rank r opens GPU `gpu + r` while it imports. None: no GPU.
    """

    def __init__(self, function: str, count: int = 0, gpu: int | None = None) -> None:
        self._function, self._gpu = function, gpu
        self._workers: list[LocalWorker] = []
        self._spawn(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.channel.abort()
            worker.kill()
        self._workers.clear()

    def assign(self, tasks: Sequence[Any]) -> list[LocalWorker]:
        """Send a task to each of the ranks 1, 2, ...; start ranks if the pool has too few, end those left over."""
        with self:
            self._spawn(len(tasks))
            for worker, task in zip(self._workers, tasks, strict=False):
                with contextlib.suppress(OSError):  # it has ended, which the owner of the channel notices
                    worker.channel.send(MessageKind.TASK, pickle.dumps(task))
            assigned = self._workers[: len(tasks)]
            self._workers = self._workers[len(tasks) :]
        return assigned

    def _spawn(self, count: int) -> None:
        """Start ranks until the pool has `count`."""
        try:
            while len(self._workers) < count:
                rank = len(self._workers) + 1
                self._workers.append(_spawn(rank, self._function, None if self._gpu is None else self._gpu + rank))
        except BaseException:
            self.__exit__()
            raise


def _spawn(rank: int, function: str, gpu: int | None) -> LocalWorker:
    parent_end, child_end = Pipe()
    with child_end:
        # A process group of its own: Ctrl-C ends the leader, which ends its ranks.
        process = ChildProcess(_main, child_end.fileno(), function, gpu, pass_fds=[child_end.fileno()], new_group=True)
    return LocalWorker(rank, process, Channel(parent_end))


def _main(fd: int, function: str, gpu: int | None) -> None:
    """Run a rank's process: import `function`, then call it with the task received."""
    channel = Channel(Connection(fd))
    if gpu is not None:
        open_gpu_context(gpu)
    with gc.gc_frozen_after():
        run = resolve_function(function)
    try:
        kind, payload = channel.receive()
    except (EOFError, OSError):  # the leader has ended, or needs no ranks
        os._exit(1)
    assert kind == MessageKind.TASK
    run(channel, pickle.loads(payload))


def resolve_function(function: str) -> Any:
    """Import the function named `module:name`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
