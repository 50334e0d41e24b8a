"""Pace the admission of requests: one after each step's tokens.

To parse and submit a request takes the HTTP process as long as the tokens of about twenty streams. If that starts just before a
step's tokens arrive, it delays all streams, and two requests in a row delay them longer: with a small model, this set the p99 of
inter-token latency. After a step's tokens the process is idle until the next step.
"""

from __future__ import annotations

import asyncio
from collections import deque

from torchweave.utils.gc import collect_if_due

_MAX_WAIT_SECONDS = 4e-3
"""Longest wait of the first request for tokens; divided by the length of the queue, so that a long queue drains fast."""
_TOKENS_EXPECTED_SECONDS = 0.1  # after the last tokens, further ones are expected for this long


class AdmissionPacer:
    """Admits requests one by one while tokens are streamed, and at once otherwise. Used from the event loop only."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._tokens_expected_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Wait for admission."""
        loop = asyncio.get_running_loop()
        if not self._waiters and loop.time() >= self._tokens_expected_until:
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        self._arm_timer(loop)
        await waiter

    def on_step_tokens(self, more: bool) -> None:
        """Admit the next request after a step's tokens were delivered; `more`: requests wait for further tokens."""
        loop = asyncio.get_running_loop()
        self._tokens_expected_until = loop.time() + _TOKENS_EXPECTED_SECONDS if more else 0.0
        loop.call_soon(self._admit_next if self._waiters else collect_if_due)  # after the tasks that the tokens woke

    def _admit_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # the client is still connected
                waiter.set_result(None)
                if self._tokens_expected_until:
                    break
        else:
            collect_if_due()
        if self._waiters:
            self._arm_timer(asyncio.get_running_loop())

    def _arm_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(_MAX_WAIT_SECONDS / len(self._waiters), self._admit_next)
