"""When the HTTP process takes in the next request: right behind a step's tokens of those who are answered already.

To read, check and hand on a request takes the process about as long as the tokens of twenty streams. Whenever that was begun just
before a step's tokens came, all streams saw a pause, and a longer one where two requests lay on top of each other: with a small
model that was the p99 of the time between tokens. Behind the tokens the process would have waited for the next step.
"""

from __future__ import annotations

import asyncio
from collections import deque

from torchweave.utils.gc import collect_if_due

_SECONDS = 4e-3
"""The longest that the first in line waits for tokens; divided by the length of the line, which empties as fast as it can."""
_FLOW_SECONDS = 0.1  # behind the last tokens, in which more are to be expected


class Turns:
    """Lets requests in one by one while tokens flow, at once while none do. Belongs to the event loop."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._flows_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if not self._line and loop.time() >= self._flows_until:
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._line.append(turn)
        self._arm(loop)
        await turn

    def tokens_passed(self, more: bool) -> None:
        """A step's tokens were given to those who wait for them; `more`: somebody waits for the next ones."""
        loop = asyncio.get_running_loop()
        self._flows_until = loop.time() + _FLOW_SECONDS if more else 0.0
        loop.call_soon(self._next)  # behind those that the tokens have woken

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._line:
            turn = self._line.popleft()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                if self._flows_until:
                    break
        else:
            collect_if_due()
        if self._line:
            self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(_SECONDS / len(self._line), self._next)
