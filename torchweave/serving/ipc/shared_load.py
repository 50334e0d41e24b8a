"""How much each HTTP process has in flight at each engine, and whose turn it is, in memory that all of them see.

Each writes its own numbers only, so nothing is locked; a sum is as old as the oldest of its parts, which is microseconds. A turn
that two of them give at the same moment is one.
"""

from __future__ import annotations

from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any


class SharedLoad:
    """Numbers of every pair of an engine and an HTTP process. Can be handed to a process only while that is started.

    Args:
        engines: engines.
        frontends: HTTP processes.

    Attributes:
        last: the engine that got the latest request, of any HTTP process; -1 before the first.
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
        """What an HTTP process has in flight at an engine: requests, and tokens of their prompts that were not read."""
        self._requests[engine][frontend] = requests
        self._pending_prefill_tokens[engine][frontend] = pending_prefill_tokens

    def requests(self, engine: int) -> int:
        """Requests of all HTTP processes in flight at an engine."""
        return sum(self._requests[engine])

    def has_requests(self, frontend: int) -> bool:
        """Whether an HTTP process has requests in flight, at whichever engine."""
        return any(each[frontend] for each in self._requests)

    def pending_prefill_tokens(self, engine: int) -> int:
        """Tokens of their prompts that the engine has not read."""
        return sum(self._pending_prefill_tokens[engine])
