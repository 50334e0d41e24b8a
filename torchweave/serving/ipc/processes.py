"""Child processes of the server: their socket folder, signals and exit."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

_log = logging.getLogger("torchweave")
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
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


def spawn(target: Callable[..., None], *args: Any, name: str) -> SpawnProcess:
    """Start a process with a name (at most 15 letters) for `ps` and `top`.

    Ctrl-C and a SIGTERM to the process group do not end it or its children: the server ends it by a message.
    """
    process = multiprocessing.get_context("spawn").Process(target=_process_main, args=(name, target, *args), name=name)
    resource_tracker.ensure_running()  # started along with the first process, it would lift the mask below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _process_main(name: str, target: Callable[..., None], *args: Any) -> None:
    os.setpgid(0, 0)
    # Discards signals that are pending. Children inherit a mask, but not a handler that is a function.
    for each in _BLOCKED_SIGNALS:
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
    with suppress(OSError):  # the file exists on Linux only
        Path("/proc/self/comm").write_text(name)
    target(*args)


def process_exit(process: SpawnProcess) -> asyncio.Future[None]:
    """Future that completes when the process has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_exit() -> None:
        loop.remove_reader(process.sentinel)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(process.sentinel, on_exit)
    return ended


def kill_and_wait(process: SpawnProcess) -> None:
    """Kill a process and wait until it is gone; a GPU driver takes a while to release its memory."""
    process.kill()
    process.join()


def exit_with_parent(folder: str) -> None:
    """End this process as soon as its parent has ended, and remove `folder` (their sockets). Starts a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
