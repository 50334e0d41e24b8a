"""The other ranks as their leader sees them: told what to do, watched, and ended together when one of them fails.

A thread hears what they say and gives a sign of life each `channel.HEARTBEAT_SECONDS` seconds. A rank that ends,
fails or falls silent is the
failure of all: the rest are killed, and the leader finds the reason in `failure`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

from torchweave.distributed import channel
from torchweave.distributed.channel import Channel

_END_SECONDS = 5.0  # for a rank to end by itself
_FAULT_DELAY_SECONDS = 3.0  # in which the reason of another rank's end arrives, once the leader has felt it


class RankFailure(RuntimeError):
    """A rank ended, failed or fell silent. `user_error`: because of what was asked, an option or a model that cannot be."""

    def __init__(self, sentence: str, user_error: bool = False) -> None:
        super().__init__(sentence)
        self.user_error = user_error


class Worker(Protocol):
    """Another rank, however it was started."""

    @property
    def name(self) -> str:
        """For people: `rank 1 (process 4711)`."""
        ...

    @property
    def peer_channel(self) -> Channel: ...

    def exit_reason(self) -> str:
        """How its process ended, as a clause (`exit code 1`), waiting a moment for it; empty where that is not known."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, but no longer than so many seconds."""
        ...

    def kill(self) -> None:
        """End it now, whatever it does."""
        ...


class WorkerGroup:
    """The other ranks of an engine.

    Args:
        workers: the ranks from 1, in their order.
        rank_timeout: seconds of silence after which a built rank counts as hung.

    Attributes:
        failure: why the ranks were ended, once they were.
        worker_facts: what each rank said of itself when it was built.
    """

    def __init__(self, workers: Sequence[Worker], rank_timeout: float) -> None:
        self.failure: RankFailure | None = None
        self.worker_facts: dict[int, dict[str, Any]] = {}
        self._workers = tuple(workers)
        self._channels = tuple(worker.peer_channel for worker in workers)
        self._timeout = rank_timeout
        self._last_seen = [time.monotonic()] * len(workers)
        self._joined: set[int] = set()
        self._digests: dict[int, bytes] = {}
        self._listeners: list[Callable[[RankFailure], None]] = []
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._monitor, name="torchweave-worker-group", daemon=True)
        self._thread.start()

    # -- from the leader's threads -------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Tell every rank the same.

        Raises:
            RankFailure: a rank is gone.
        """
        if self.failure is not None:
            raise self.failure
        for peer_channel in self._channels:
            try:
                peer_channel.send(kind, payload)
            except OSError as error:
                self.fail_and_raise(error)

    def check(self) -> None:
        """Raise `failure` if there is one."""
        if self.failure is not None:
            raise self.failure

    def wait_until_joined(self) -> None:
        """Wait until every rank is about to join the world."""
        self._wait_for(lambda: len(self._joined) == len(self._workers))

    def wait_until_built(self) -> None:
        """Wait until every rank has built its engine."""
        self._wait_for(lambda: len(self.worker_facts) == len(self._workers))

    def digests(self, seconds: float) -> list[bytes]:
        """What the ranks have said of themselves after the last `IDLE`; waits until all have."""
        self._wait_for(lambda: len(self._digests) == len(self._workers), seconds)
        found = [self._digests[number] for number in range(len(self._workers))]
        self._digests.clear()
        return found

    def root_cause(self, error: BaseException) -> BaseException:
        """The failure of a rank that is behind an error of the leader's own; the error itself where there is none.

        A collective fails on all ranks when one is gone: what happened there arrives a moment later.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None, _FAULT_DELAY_SECONDS)
        return self.failure or error

    def fail_and_raise(self, error: Exception) -> NoReturn:
        """End all ranks for an error of the leader's own, or for what is behind it, and raise that."""
        cause = self.root_cause(error)
        if cause is error:
            self.fail(error if isinstance(error, RankFailure) else RankFailure(f"Rank 0 failed: {error}"))
            raise error
        raise cause from error

    def on_failure(self, listener: Callable[[RankFailure], None]) -> None:
        """Call `listener` once, on a thread of its own, when a rank fails; at once where one has."""
        with self._condition:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def fail(self, failure: RankFailure) -> None:
        """End all ranks for a reason; only the first one counts."""
        with self._condition:
            if self.failure is not None or self._closing:
                return
            self.failure = failure
            self._condition.notify_all()
            listeners = tuple(self._listeners)
        for worker in self._workers:
            worker.peer_channel.abort()
            worker.kill()
        for listener in listeners:
            threading.Thread(target=listener, args=(failure,), daemon=True).start()

    def request_shutdown(self) -> bool:
        """Tell the ranks to end once they have done what they were told before, and return whether this is the first time.

        `close` waits for them.
        """
        with self._condition:
            if self._closing:
                return False
            self._closing = True
        for peer_channel in self._channels:
            peer_channel.try_send(channel.END)
        return True

    def close(self) -> None:
        """End the ranks. One that does not end by itself is killed."""
        self.request_shutdown()
        deadline = time.monotonic() + (0.0 if self.failure else _END_SECONDS)
        for worker in self._workers:
            worker.wait(max(deadline - time.monotonic(), 0.0))
            worker.kill()
            worker.peer_channel.abort()
        self._thread.join(_END_SECONDS)

    def _wait_for(self, predicate: Callable[[], bool], seconds: float | None = None) -> None:
        with self._condition:
            in_time = self._condition.wait_for(lambda: predicate() or self.failure is not None, seconds)
        self.check()
        if not in_time:
            raise RankFailure(f"The ranks did not answer within {seconds:g} s")

    # -- the watching thread -------------------------------------------------------------------------------------------

    def _monitor(self) -> None:
        numbers = {peer_channel: number for number, peer_channel in enumerate(self._channels)}
        last_beat = 0.0
        while self.failure is None and not self._closing:
            for peer_channel in wait(list(numbers), channel.HEARTBEAT_SECONDS):  # type: ignore[arg-type]
                self._on_message(numbers[peer_channel])  # type: ignore[index]
            now = time.monotonic()
            if now - last_beat >= channel.HEARTBEAT_SECONDS:
                last_beat = now
                for peer_channel in self._channels:
                    peer_channel.try_send(channel.ALIVE)
                self._check_heartbeats(now)

    def _on_message(self, number: int) -> None:
        worker = self._workers[number]
        try:
            kind, payload = self._channels[number].receive()
        except (EOFError, OSError):
            how = worker.exit_reason()
            self.fail(RankFailure(f"{worker.name} has ended unexpectedly{f' ({how})' if how else ''}"))
            return
        self._last_seen[number] = time.monotonic()
        if kind == channel.FAILED:
            user_error, sentence = pickle.loads(payload)
            self.fail(RankFailure(sentence if user_error else f"{worker.name} failed: {sentence}", user_error))
            return
        with self._condition:
            if kind == channel.JOINED:
                self._joined.add(number)
            elif kind == channel.BUILT:
                self.worker_facts[number] = pickle.loads(payload)
            elif kind == channel.DIGEST:
                self._digests[number] = payload
            self._condition.notify_all()

    def _check_heartbeats(self, now: float) -> None:
        limit = (
            self._timeout
            if len(self.worker_facts) == len(self._workers)
            else max(self._timeout, channel.BUILD_TIMEOUT_SECONDS)
        )
        for number, last_seen in enumerate(self._last_seen):
            if now - last_seen > limit:
                self.fail(RankFailure(f"{self._workers[number].name} has not answered for {limit:g} s"))
                return
