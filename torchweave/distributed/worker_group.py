"""The other ranks as their leader sees them: told what to do, watched, and ended together when one of them fails.

A thread hears what they say and gives a sign of life each `link.BEAT` seconds. A rank that ends, fails or falls silent is the
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
from torchweave.distributed.channel import Link

_END_SECONDS = 5.0  # for a rank to end by itself
_ECHO_SECONDS = 3.0  # in which the reason of another rank's end arrives, once the leader has felt it


class RankFailure(RuntimeError):
    """A rank ended, failed or fell silent. `asked`: because of what was asked, an option or a model that cannot be."""

    def __init__(self, sentence: str, asked: bool = False) -> None:
        super().__init__(sentence)
        self.asked = asked


class Member(Protocol):
    """Another rank, however it was started."""

    @property
    def name(self) -> str:
        """For people: `rank 1 (process 4711)`."""
        ...

    @property
    def link(self) -> Link: ...

    def how_it_ended(self) -> str:
        """How its process ended, as a clause (`exit code 1`), waiting a moment for it; empty where that is not known."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, but no longer than so many seconds."""
        ...

    def kill(self) -> None:
        """End it now, whatever it does."""
        ...


class Crew:
    """The other ranks of an engine.

    Args:
        members: the ranks from 1, in their order.
        rank_timeout: seconds of silence after which a built rank counts as hung.

    Attributes:
        failure: why the ranks were ended, once they were.
        built: what each rank said of itself when it was built.
    """

    def __init__(self, members: Sequence[Member], rank_timeout: float) -> None:
        self.failure: RankFailure | None = None
        self.built: dict[int, dict[str, Any]] = {}
        self._members = tuple(members)
        self._links = tuple(member.link for member in members)
        self._timeout = rank_timeout
        self._heard = [time.monotonic()] * len(members)
        self._joined: set[int] = set()
        self._digests: dict[int, bytes] = {}
        self._listeners: list[Callable[[RankFailure], None]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="torchweave-crew", daemon=True)
        self._thread.start()

    # -- from the leader's threads -------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Tell every rank the same.

        Raises:
            RankFailure: a rank is gone.
        """
        if self.failure is not None:
            raise self.failure
        for link in self._links:
            try:
                link.send(kind, payload)
            except OSError as error:
                self.fail_for(error)

    def check(self) -> None:
        """Raise `failure` if there is one."""
        if self.failure is not None:
            raise self.failure

    def wait_until_joined(self) -> None:
        """Wait until every rank is about to join the world."""
        self._wait_for(lambda: len(self._joined) == len(self._members))

    def wait_until_built(self) -> None:
        """Wait until every rank has built its engine."""
        self._wait_for(lambda: len(self.built) == len(self._members))

    def digests(self, seconds: float) -> list[bytes]:
        """What the ranks have said of themselves after the last `REST`; waits until all have."""
        self._wait_for(lambda: len(self._digests) == len(self._members), seconds)
        found = [self._digests[number] for number in range(len(self._members))]
        self._digests.clear()
        return found

    def cause_of(self, error: BaseException) -> BaseException:
        """The failure of a rank that is behind an error of the leader's own; the error itself where there is none.

        A collective fails on all ranks when one is gone: what happened there arrives a moment later.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, _ECHO_SECONDS)
        return self.failure or error

    def fail_for(self, error: Exception) -> NoReturn:
        """End all ranks for an error of the leader's own, or for what is behind it, and raise that."""
        cause = self.cause_of(error)
        if cause is error:
            self.fail(error if isinstance(error, RankFailure) else RankFailure(f"Rank 0 failed: {error}"))
            raise error
        raise cause from error

    def on_failure(self, listener: Callable[[RankFailure], None]) -> None:
        """Call `listener` once, on a thread of its own, when a rank fails; at once where one has."""
        with self._changed:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def fail(self, failure: RankFailure) -> None:
        """End all ranks for a reason; only the first one counts."""
        with self._changed:
            if self.failure is not None or self._closing:
                return
            self.failure = failure
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for member in self._members:
            member.link.abort()
            member.kill()
        for listener in listeners:
            threading.Thread(target=listener, args=(failure,), daemon=True).start()

    def dismiss(self) -> bool:
        """Tell the ranks to end once they have done what they were told before, and return whether this is the first time.

        `close` waits for them.
        """
        with self._changed:
            if self._closing:
                return False
            self._closing = True
        for link in self._links:
            link.try_send(channel.END)
        return True

    def close(self) -> None:
        """End the ranks. One that does not end by itself is killed."""
        self.dismiss()
        deadline = time.monotonic() + (0.0 if self.failure else _END_SECONDS)
        for member in self._members:
            member.wait(max(deadline - time.monotonic(), 0.0))
            member.kill()
            member.link.abort()
        self._thread.join(_END_SECONDS)

    def _wait_for(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: holds() or self.failure is not None, seconds)
        self.check()
        if not in_time:
            raise RankFailure(f"The ranks did not answer within {seconds:g} s")

    # -- the watching thread -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        numbers = {link: number for number, link in enumerate(self._links)}
        beaten = 0.0
        while self.failure is None and not self._closing:
            for link in wait(list(numbers), channel.BEAT):
                self._hear(numbers[link])  # type: ignore[index]
            now = time.monotonic()
            if now - beaten >= channel.BEAT:
                beaten = now
                for link in self._links:
                    link.try_send(channel.ALIVE)
                self._look_for_silence(now)

    def _hear(self, number: int) -> None:
        member = self._members[number]
        try:
            kind, payload = self._links[number].receive()
        except (EOFError, OSError):
            how = member.how_it_ended()
            self.fail(RankFailure(f"{member.name} has ended unexpectedly{f' ({how})' if how else ''}"))
            return
        self._heard[number] = time.monotonic()
        if kind == channel.FAILED:
            asked, sentence = pickle.loads(payload)
            self.fail(RankFailure(sentence if asked else f"{member.name} failed: {sentence}", asked))
            return
        with self._changed:
            if kind == channel.JOINED:
                self._joined.add(number)
            elif kind == channel.BUILT:
                self.built[number] = pickle.loads(payload)
            elif kind == channel.DIGEST:
                self._digests[number] = payload
            self._changed.notify_all()

    def _look_for_silence(self, now: float) -> None:
        limit = self._timeout if len(self.built) == len(self._members) else max(self._timeout, channel.BUILD_SILENCE)
        for number, heard in enumerate(self._heard):
            if now - heard > limit:
                self.fail(RankFailure(f"{self._members[number].name} has not answered for {limit:g} s"))
                return
