"""When the HTTP process takes in the next request: right behind a step's tokens of those who are answered already.

To read, check and hand on a request takes the process about as long as the tokens of twenty streams. Whenever that was begun just
before a step's tokens came, all streams saw a pause, and a longer one where two requests lay on top of each other: with a small
model that was the p99 of the time between tokens. Behind the tokens the process would have waited for the next step.
"""

from __future__ import annotations

import asyncio
from collections import deque

from torchweave.utils.gc import collect_if_due

_MAX_WAIT_SECONDS = 4e-3
"""The longest that the first in line waits for tokens; divided by the length of the line, which empties as fast as it can."""
_TOKENS_EXPECTED_SECONDS = 0.1  # behind the last tokens, in which more are to be expected


class AdmissionPacer:
    """Lets requests in one by one while tokens flow, at once while none do. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._tokens_expected_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if not self._waiters and loop.time() >= self._tokens_expected_until:
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        self._arm_timer(loop)
        await waiter

    def on_step_tokens(self, more: bool) -> None:
        """A step's tokens were given to those who wait for them; `more`: somebody waits for the next ones."""
        loop = asyncio.get_running_loop()
        self._tokens_expected_until = loop.time() + _TOKENS_EXPECTED_SECONDS if more else 0.0
        loop.call_soon(self._admit_next)  # behind those that the tokens have woken

    def _admit_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # its client has not left
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
