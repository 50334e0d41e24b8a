"""Requests in flight by HTTP process and engine, and the round-robin position, in shared memory.

Each process writes only its own counters, so no lock is needed; sums are stale by microseconds. If two processes advance the
round-robin position at the same moment, it advances once.
"""

from __future__ import annotations

from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any


class SharedLoad:
    """Counters for every pair of an engine and an HTTP process. Can be passed to a process only at its start.

    Args:
        engines: engines.
        frontends: HTTP processes.

    Attributes:
        last: engine of the latest request of any HTTP process; -1 before the first.
    """

    def __init__(self, engines: int = 1, frontends: int = 1) -> None:
        self._requests: list[Any] = [RawArray("q", frontends) for _ in range(engines)]
        self._pending_prefill_tokens: list[Any] = [RawArray("q", frontends) for _ in range(engines)]
        self._last: Any = RawValue("q", -1)

    @property
    def last(self) -> int:
        return self._last.value

    @last.setter
    def last(self, engine: int) -> None:
        self._last.value = engine

    def write(self, engine: int, frontend: int, requests: int, pending_prefill_tokens: int) -> None:
        """Set the counters of one HTTP process at one engine."""
        self._requests[engine][frontend] = requests
        self._pending_prefill_tokens[engine][frontend] = pending_prefill_tokens

    def requests(self, engine: int) -> int:
        """Requests in flight at an engine, of all HTTP processes."""
        return sum(self._requests[engine])

    def has_requests(self, frontend: int) -> bool:
        """Whether an HTTP process has requests in flight at any engine."""
        return any(each[frontend] for each in self._requests)

    def pending_prefill_tokens(self, engine: int) -> int:
        """Prompt tokens in flight at an engine that it has not prefilled, of all HTTP processes."""
        return sum(self._pending_prefill_tokens[engine])
