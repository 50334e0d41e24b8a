"""Processes of the server: where they meet, which signals do not reach them, and how their ends are seen."""

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
"""Bytes of a folder's path below which there is room for ours and a socket in it: the whole has 104 on some systems."""


def critical_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task without which this process is of no use: a fault in it, which nobody would see, is logged and ends the process."""
    task = asyncio.create_task(work)
    task.add_done_callback(_exit_on_failure)
    return task


def _exit_on_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.critical("A process of the server ends, for it cannot go on.", exc_info=fault)
        os._exit(1)


def make_socket_dir() -> str:
    """A new folder for sockets, which nobody else can enter: among temporary files, or in /tmp where those lie too deep."""
    tmp_dir = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="torchweave-", dir=tmp_dir if len(os.fsencode(tmp_dir)) <= _MAX_TMP_DIR_BYTES else "/tmp"
    )


def spawn(target: Callable[..., None], *args: Any, name: str) -> SpawnProcess:
    """Start a process, which `ps` and `top` show by its name (of at most 15 letters).

    Neither it nor what it starts sees Ctrl-C or a SIGTERM to the whole group: this process tells it when to end.
    """
    process = multiprocessing.get_context("spawn").Process(target=_process_main, args=(name, target, *args), name=name)
    resource_tracker.ensure_running()  # it would be started with the first process, and lift what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _process_main(name: str, target: Callable[..., None], *args: Any) -> None:
    os.setpgid(0, 0)
    # What came until now. A handler that is a function is not handed down to what this process starts, and a mask would be.
    for each in _BLOCKED_SIGNALS:
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
    with suppress(OSError):  # there is no such file but on Linux
        Path("/proc/self/comm").write_text(name)
    target(*args)


def process_exit(process: SpawnProcess) -> asyncio.Future[None]:
    """Done when the process has ended."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()

    def on_exit() -> None:
        loop.remove_reader(process.sentinel)
        if not found.done():
            found.set_result(None)

    loop.add_reader(process.sentinel, on_exit)
    return found


def kill_and_wait(process: SpawnProcess) -> None:
    """End a process and wait until all of it is gone; the driver of a GPU takes its time."""
    process.kill()
    process.join()


def exit_with_parent(folder: str) -> None:
    """End this process at once when the one that started it has ended, however it did. Starts a thread.

    Args:
        folder: where they met, which nobody else is left to remove.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
