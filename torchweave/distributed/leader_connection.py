"""The leader as another rank sees it: a thread takes in what it sends, and ends this process when it is gone."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from typing import Any

from torchweave.distributed import channel
from torchweave.distributed.channel import Channel

Message = tuple[bytes, bytes]


class LeaderConnection:
    """Hears the leader and gives signs of life.

    A rank may be in a collective that waits for another one for ever, so that only this thread can see that the leader has
    ended: it ends the whole process then, at once.

    Args:
        channel: to the leader.
        rank_timeout: seconds of silence after which a leader that has built its engine counts as hung.
    """

    def __init__(self, channel: Channel, rank_timeout: float) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._channel = channel
        self._timeout = rank_timeout
        self._leader_ready = False  # the leader has built its engine
        threading.Thread(target=self._receive_loop, name="torchweave-leader-connection", daemon=True).start()

    def report_joined(self) -> None:
        """Tell that this rank is about to join the world."""
        self._channel.send(channel.JOINED)

    def report_built(self, facts: dict[str, Any]) -> None:
        """Tell that this rank has built its engine."""
        self._channel.send(channel.BUILT, pickle.dumps(facts))

    def digest(self, digest: bytes) -> None:
        """Tell what this rank has come to."""
        self._channel.send(channel.DIGEST, digest)

    def report_failure(self, sentence: str, user_error: bool) -> None:
        """Tell why this rank cannot go on; `user_error`: because of what was asked."""
        self._channel.send(channel.FAILED, pickle.dumps((user_error, sentence)))

    def _receive_loop(self) -> None:
        last_seen, last_beat = time.monotonic(), 0.0
        while True:
            try:
                while self._channel.poll(channel.HEARTBEAT_SECONDS):
                    kind, payload = self._channel.receive()
                    last_seen = time.monotonic()
                    if kind != channel.ALIVE:
                        self._leader_ready |= kind == channel.STEP
                        self.messages.put((kind, payload))
                    if kind == channel.END:
                        return
                    if last_seen - last_beat >= channel.HEARTBEAT_SECONDS:
                        self._channel.try_send(channel.ALIVE)
                        last_beat = last_seen
            except (EOFError, OSError):
                os._exit(1)
            last_beat = time.monotonic()
            self._channel.try_send(channel.ALIVE)
            if last_beat - last_seen > (
                self._timeout if self._leader_ready else max(self._timeout, channel.BUILD_TIMEOUT_SECONDS)
            ):
                os._exit(1)
