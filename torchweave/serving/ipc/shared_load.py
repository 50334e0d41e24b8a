"""Requests in flight by HTTP process and engine, and the round-robin position, in shared memory.

Each process writes only its own counters, so no lock is needed; sums are stale by microseconds. If two processes advance the
round-robin position at the same moment, it advances once.
"""

from __future__ import annotations

import mmap
import os

import numpy as np


class SharedLoad:
    """Counters for every pair of an engine and an HTTP process.

    Args:
        engines: engines.
        frontends: HTTP processes.
        fd: the counters to share, in a process that has inherited it; None: new counters.

    Attributes:
        fd: file descriptor of the counters; -1 for a single HTTP process.
    """

    def __init__(self, engines: int = 1, frontends: int = 1, fd: int | None = None) -> None:
        num_bytes = 8 * (2 * engines * frontends + 1)
        if fd is None:
            fd = os.memfd_create("torchweave-load") if frontends > 1 else -1  # only Linux has several HTTP processes
            if fd >= 0:
                os.ftruncate(fd, num_bytes)
        self.fd = fd
        values = np.frombuffer(mmap.mmap(fd, num_bytes), np.int64)
        self._next, counters = values[:1], values[1:].reshape(2, engines, frontends)
        self._requests, self._pending_prefill_tokens = counters

    @property
    def last(self) -> int:
        """Engine of the latest request of any HTTP process; -1 before the first."""
        return int(self._next[0]) - 1

    @last.setter
    def last(self, engine: int) -> None:
        self._next[0] = engine + 1

    def write(self, engine: int, frontend: int, requests: int, pending_prefill_tokens: int) -> None:
        """Set the counters of one HTTP process at one engine."""
        self._requests[engine, frontend] = requests
        self._pending_prefill_tokens[engine, frontend] = pending_prefill_tokens

    def requests(self, engine: int) -> int:
        """Requests in flight at an engine, of all HTTP processes."""
        return int(self._requests[engine].sum())

    def has_requests(self, frontend: int) -> bool:
        """Whether an HTTP process has requests in flight at any engine."""
        return bool(self._requests[:, frontend].any())

    def pending_prefill_tokens(self, engine: int) -> int:
        """Prompt tokens in flight at an engine that it has not prefilled, of all HTTP processes."""
        return int(self._pending_prefill_tokens[engine].sum())
