"""Threads that several clients share: the jobs of one cannot delay another's first."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Value = TypeVar("Value")
_Job = tuple[Future[Any], Callable[[], Any]]


class FairThreads:
    """Runs the jobs of each client in their order, and those of several in turn. Thread-safe; threads start with the first jobs.

    A client has at most `count` threads, and there is one more: however long the jobs of one are, another's first finds it free.

    Args:
        count: threads of one client.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count + 1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}  # the client whose turn is next first
        self._running: Counter[str] = Counter()

    def submit(self, client: str, work: Callable[[], Value]) -> Future[Value]:
        """Run `work` when it is the client's turn, unless the future is cancelled before."""
        future: Future[Value] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
            self._start()
        return future

    def _start(self) -> None:
        """Start jobs on the threads that are free; called with the lock."""
        while self._running.total() <= self._count:
            client = next((each for each in self._waiting if self._running[each] < self._count), None)
            if client is None:
                return
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # the last in turn
            self._running[client] += 1
            self._pool.submit(self._run, client, job)

    def _run(self, client: str, job: _Job) -> None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # a panic of Rust is none of Exception
                future.set_exception(error)
        with self._lock:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
            self._start()
