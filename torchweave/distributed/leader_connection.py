"""The leader as another rank sees it: a thread takes in what it sends, and ends this process when it is gone."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from typing import Any

from torchweave.distributed import channel
from torchweave.distributed.channel import Link

Message = tuple[bytes, bytes]


class Follower:
    """Hears the leader and gives signs of life.

    A rank may be in a collective that waits for another one for ever, so that only this thread can see that the leader has
    ended: it ends the whole process then, at once.

    Args:
        link: to the leader.
        rank_timeout: seconds of silence after which a leader that has built its engine counts as hung.
    """

    def __init__(self, link: Link, rank_timeout: float) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._link = link
        self._timeout = rank_timeout
        self._led = False  # the leader has built its engine
        threading.Thread(target=self._listen, name="torchweave-follower", daemon=True).start()

    def joined(self) -> None:
        """Tell that this rank is about to join the world."""
        self._link.send(channel.JOINED)

    def built(self, facts: dict[str, Any]) -> None:
        """Tell that this rank has built its engine."""
        self._link.send(channel.BUILT, pickle.dumps(facts))

    def digest(self, digest: bytes) -> None:
        """Tell what this rank has come to."""
        self._link.send(channel.DIGEST, digest)

    def failed(self, sentence: str, asked: bool) -> None:
        """Tell why this rank cannot go on; `asked`: because of what was asked."""
        self._link.send(channel.FAILED, pickle.dumps((asked, sentence)))

    def _listen(self) -> None:
        heard, beaten = time.monotonic(), 0.0
        while True:
            try:
                while self._link.poll(channel.BEAT):
                    kind, payload = self._link.receive()
                    heard = time.monotonic()
                    if kind != channel.ALIVE:
                        self._led |= kind == channel.STEP
                        self.messages.put((kind, payload))
                    if kind == channel.END:
                        return
                    if heard - beaten >= channel.BEAT:
                        self._link.try_send(channel.ALIVE)
                        beaten = heard
            except (EOFError, OSError):
                os._exit(1)
            beaten = time.monotonic()
            self._link.try_send(channel.ALIVE)
            if beaten - heard > (self._timeout if self._led else max(self._timeout, channel.BUILD_SILENCE)):
                os._exit(1)
