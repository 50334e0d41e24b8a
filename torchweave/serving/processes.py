"""Processes of the server: they see no signal that is meant for it, and their ends are seen by its event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any


def spawn(target: Callable[..., None], *args: Any, name: str) -> SpawnProcess:
    """Start a process, which `ps` and `top` show by its name (of at most 15 letters).

    It never sees Ctrl-C or a SIGTERM to the whole group: this process tells it when to end.
    """
    process = multiprocessing.get_context("spawn").Process(target=_named, args=(name, target, *args), name=name)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _named(name: str, target: Callable[..., None], *args: Any) -> None:
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
