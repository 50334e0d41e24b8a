"""Processes of the server: signals that are meant for it do not reach them, and it sees their ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

_OF_A_GROUP = (signal.SIGINT, signal.SIGTERM)


def spawn(target: Callable[..., None], *args: Any, name: str) -> SpawnProcess:
    """Start a process, which `ps` and `top` show by its name (of at most 15 letters).

    Neither it nor what it starts sees Ctrl-C or a SIGTERM to the whole group: this process tells it when to end.
    """
    process = multiprocessing.get_context("spawn").Process(target=_apart, args=(name, target, *args), name=name)
    resource_tracker.ensure_running()  # it would be started with the first process, and lift what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_GROUP)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _apart(name: str, target: Callable[..., None], *args: Any) -> None:
    os.setpgid(0, 0)
    # What came until now. A handler that is a function is not handed down to what this process starts, and a mask would be.
    for each in _OF_A_GROUP:
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_GROUP)
    with suppress(OSError):  # there is no such file but on Linux
        Path("/proc/self/comm").write_text(name)
    target(*args)


def ended(process: SpawnProcess) -> asyncio.Future[None]:
    """Done when the process has ended."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        loop.remove_reader(process.sentinel)
        if not found.done():
            found.set_result(None)

    loop.add_reader(process.sentinel, tell)
    return found


def bury(process: SpawnProcess) -> None:
    """End a process and wait until all of it is gone; the driver of a GPU takes its time."""
    process.kill()
    process.join()


def follow_parent() -> None:
    """End this process at once when the one that started it has ended, however it did. Returns never: for a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
