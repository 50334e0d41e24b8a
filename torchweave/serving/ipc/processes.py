"""Child processes of the server: their socket folder, start and exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchweave.utils.child_process import ChildProcess

_log = logging.getLogger("torchweave")
PING_SECONDS = 1.0
_MAX_TMP_DIR_BYTES = 64
"""Longest path of a folder for our folder and a socket: a Unix socket's path has at most 104 bytes on some systems."""


def critical_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that this process cannot do without: its failure is logged and ends the process."""
    task = asyncio.create_task(work)
    task.add_done_callback(_exit_on_failure)
    return task


def _exit_on_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.critical("A server process ends because one of its tasks failed.", exc_info=fault)
        os._exit(1)


def make_socket_dir() -> str:
    """Make a private folder for sockets in the temporary directory, or in /tmp if that directory's path is too long."""
    tmp_dir = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="torchweave-", dir=tmp_dir if len(os.fsencode(tmp_dir)) <= _MAX_TMP_DIR_BYTES else "/tmp"
    )


def spawn(target: Callable[..., None], *args: Any, name: str, pass_fds: Sequence[int] = ()) -> ChildProcess:
    """Start a process that Ctrl-C and a SIGTERM to the process group do not end: the server ends it by a message."""
    return ChildProcess(
        target, *args, name=name, pass_fds=pass_fds, new_group=True, ignored_signals=(signal.SIGINT, signal.SIGTERM)
    )


class Silence:
    """How long another process has sent nothing.

    Attributes:
        seconds: since its last message, as far as this process ran meanwhile: it may have been stopped itself.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._heard = True

    def end(self) -> None:
        """There is a message."""
        self._heard = True

    async def wait(self) -> None:
        """Wait a second; begin anew if `end` was called meanwhile."""
        self._heard, before = False, asyncio.get_running_loop().time()
        await asyncio.sleep(PING_SECONDS)
        passed = asyncio.get_running_loop().time() - before
        self.seconds = 0.0 if self._heard else self.seconds + min(passed, 2 * PING_SECONDS)


def process_exit(process: ChildProcess) -> asyncio.Future[None]:
    """Future that completes when the process has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_exit() -> None:
        loop.remove_reader(process)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(process, on_exit)
    return ended
