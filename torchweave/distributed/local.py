"""Ranks as processes of this machine: fresh interpreters, never forks, so that no CUDA state is shared by accident.

They are started as commands rather than by `multiprocessing`, which would run the user's script again in each of them: a
script without `if __name__ == "__main__"`, a notebook and an interactive session work as they are.
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
from typing import Any

from torchweave import imports
from torchweave.distributed import link as links
from torchweave.distributed.link import Link

_START = "import sys; sys.path[:] = {path!r}; from torchweave.distributed.local import main; main({fd})"
_LOOK_SECONDS = 2.0  # for a process whose connection has ended to end too


class LocalMember:
    """A rank that this process has started."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], link: Link) -> None:
        self.link = link
        self.name = f"Rank {rank} (process {process.pid})"
        self._process = process

    def how_it_ended(self) -> str:
        self.wait(_LOOK_SECONDS)
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


def start_local(function: str, tasks: Sequence[Any]) -> list[LocalMember]:
    """Start a process for each of `tasks`, of ranks 1, 2, ...; each calls `function` (`module:name`) with its link and task."""
    members: list[LocalMember] = []
    try:
        for rank, task in enumerate(tasks, 1):
            members.append(_start(rank, function, task))
    except BaseException:
        for member in members:
            member.kill()
        raise
    return members


def _start(rank: int, function: str, task: Any) -> LocalMember:
    ours, theirs = Pipe()
    code = _START.format(path=sys.path, fd=theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the leader, who ends them
    )
    theirs.close()
    link = Link(ours)
    link.send(links.TASK, pickle.dumps((function, task)))
    return LocalMember(rank, process, link)


def main(fd: int) -> None:
    """What a started process runs: the task that comes first over its connection."""
    link = Link(Connection(fd))
    try:
        kind, payload = link.receive()
    except (EOFError, OSError):
        os._exit(1)
    assert kind == links.TASK
    with imports.for_good():
        function, task = pickle.loads(payload)
        run = named(function)
    run(link, task)


def named(function: str) -> Any:
    """What `module:name` names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
