"""Connections between the leader and the other ranks: messages, heartbeats, and failure of all ranks when one fails.

A message is a kind (one byte) and a payload, over a channel within a machine (a socket pair) or between two (TCP, authenticated
by a shared secret).

A thread on each side sends a heartbeat every `HEARTBEAT_SECONDS` and reads messages. When a rank ends, fails or stops answering,
`WorkerGroup` on the leader kills the other ranks and keeps the reason in `failure`. When the leader ends, `LeaderConnection` ends
the rank's process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, Protocol

_END_SECONDS = 5.0  # for a rank to exit after END
_FAULT_DELAY_SECONDS = 3.0  # until the reason of another rank's end arrives, after the leader's own error


class RankFailure(RuntimeError):
    """A rank ended, failed or stopped answering.

    Attributes:
        user_error: the cause is an unsupported option or model.
    """

    def __init__(self, sentence: str, user_error: bool = False) -> None:
        super().__init__(sentence)
        self.user_error = user_error


class Worker(Protocol):
    """A rank other than the leader, independent of its launcher.

    Attributes:
        name: for messages: `Rank 1 (process 4711)`.
    """

    name: str
    channel: Channel

    def exit_reason(self) -> str:
        """Return how its process ended (`exit code 1`), after a short wait; empty if that is unknown."""
        ...

    def wait(self, seconds: float, /) -> object:
        """Wait until its process has ended, at most `seconds`."""
        ...

    def kill(self) -> None:
        """End its process at once."""
        ...


class WorkerGroup:
    """The leader's view of the other ranks of an engine.

    Args:
        workers: ranks 1, 2, ..., in order.
        rank_timeout: seconds without a heartbeat after which a rank that has built its engine counts as hung.

    Attributes:
        failure: why the ranks were ended; None while they run.
        worker_facts: by worker number, the facts that each rank reported when its engine was built.
    """

    def __init__(self, workers: Sequence[Worker], rank_timeout: float) -> None:
        self.failure: RankFailure | None = None
        self.worker_facts: dict[int, dict[str, Any]] = {}
        self._workers = tuple(workers)
        self._channels = tuple(worker.channel for worker in workers)
        self._timeout = rank_timeout
        self._last_seen = [time.monotonic()] * len(workers)
        self._joined: set[int] = set()
        self._answers: dict[bytes, dict[int, bytes]] = {MessageKind.DIGEST: {}, MessageKind.ANSWER: {}}
        self._listeners: list[Callable[[RankFailure], None]] = []
        self._condition = threading.Condition()
        self._closing = False
        self._in_call = False  # a control call runs, which may hold the interpreter lock of a rank for long
        self._thread = threading.Thread(target=self._monitor, name="torchweave-worker-group", daemon=True)
        self._thread.start()

    # -- called by the leader's threads --------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a message to every rank.

        Raises:
            RankFailure: a rank has ended.
        """
        self.check()
        self._in_call = kind == MessageKind.CALL
        for channel in self._channels:
            try:
                channel.send(kind, payload)
            except OSError as error:
                self.fail_and_raise(error)

    def check(self) -> None:
        """Raise `failure` if there is one."""
        if self.failure is not None:
            raise self.failure

    def wait_until_joined(self) -> None:
        """Wait until every rank is about to join the process groups."""
        self._wait_for(lambda: len(self._joined) == len(self._workers))

    def wait_until_built(self) -> None:
        """Wait until every rank has built its engine."""
        self._wait_for(lambda: len(self.worker_facts) == len(self._workers))

    def answers(self, kind: bytes, seconds: float | None = None) -> list[bytes]:
        """Wait for a message of `kind` from every rank, and return them in order: `DIGEST` after `IDLE`, `ANSWER` after `CALL`."""
        answers = self._answers[kind]
        self._wait_for(lambda: len(answers) == len(self._workers), seconds)
        in_order = [answers[number] for number in range(len(self._workers))]
        answers.clear()
        return in_order

    def root_cause(self, error: BaseException) -> BaseException:
        """Return the rank failure that caused an error of the leader; the error itself if no rank has failed.

        A collective fails on all ranks when one has ended; the reason arrives a moment later.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None, _FAULT_DELAY_SECONDS)
        return self.failure or error

    def fail_and_raise(self, error: Exception) -> NoReturn:
        """End all ranks because of an error of the leader, and raise its root cause."""
        cause = self.root_cause(error)
        if cause is error:
            self.fail(error if isinstance(error, RankFailure) else RankFailure(f"Rank 0 failed: {error}"))
            raise error
        raise cause from error

    def on_failure(self, listener: Callable[[RankFailure], None]) -> None:
        """Call `listener` once, on a thread of its own, when a rank fails; immediately if one has failed."""
        with self._condition:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def fail(self, failure: RankFailure) -> None:
        """End all ranks with this failure, unless another one came first."""
        with self._condition:
            if self.failure is not None or self._closing:
                return
            self.failure = failure
            self._condition.notify_all()
            listeners = tuple(self._listeners)
        for worker in self._workers:
            worker.channel.abort()
            worker.kill()
        for listener in listeners:
            threading.Thread(target=listener, args=(failure,), daemon=True).start()

    def request_shutdown(self) -> bool:
        """Ask the ranks to end after the messages sent before; return False if that was done already. `close` waits."""
        with self._condition:
            if self._closing:
                return False
            self._closing = True
        for channel in self._channels:
            channel.try_send(MessageKind.END)
        return True

    def close(self) -> None:
        """End the ranks; kill those that do not end by themselves."""
        self.request_shutdown()
        deadline = time.monotonic() + (0.0 if self.failure else _END_SECONDS)
        for worker in self._workers:
            worker.wait(max(deadline - time.monotonic(), 0.0))
            worker.kill()
            worker.channel.abort()
        self._thread.join(_END_SECONDS)

    def _wait_for(self, predicate: Callable[[], bool], seconds: float | None = None) -> None:
        with self._condition:
            in_time = self._condition.wait_for(lambda: predicate() or self.failure is not None, seconds)
        self.check()
        if not in_time:
            raise RankFailure(f"The ranks did not answer within {seconds:g} s")

    # -- the monitor thread --------------------------------------------------------------------------------------------

    def _monitor(self) -> None:
        numbers = {channel: number for number, channel in enumerate(self._channels)}
        last_heartbeat = 0.0
        while self.failure is None and not self._closing:
            for channel in wait(list(numbers), HEARTBEAT_SECONDS):  # type: ignore[arg-type]
                self._on_message(numbers[channel])  # type: ignore[index]
            now = time.monotonic()
            if now - last_heartbeat >= HEARTBEAT_SECONDS:
                last_heartbeat = now
                for channel in self._channels:
                    channel.try_send(MessageKind.ALIVE)
                self._check_heartbeats(now)

    def _on_message(self, number: int) -> None:
        worker = self._workers[number]
        try:
            kind, payload = self._channels[number].receive()
        except (EOFError, OSError):
            reason = worker.exit_reason()
            self.fail(RankFailure(f"{worker.name} has ended unexpectedly{f' ({reason})' if reason else ''}"))
            return
        self._last_seen[number] = time.monotonic()
        if kind == MessageKind.FAILED:
            user_error, sentence = pickle.loads(payload)
            self.fail(RankFailure(sentence if user_error else f"{worker.name} failed: {sentence}", user_error))
            return
        with self._condition:
            if kind == MessageKind.JOINED:
                self._joined.add(number)
            elif kind == MessageKind.BUILT:
                self.worker_facts[number] = pickle.loads(payload)
            elif kind in self._answers:
                self._answers[kind][number] = payload
            self._condition.notify_all()

    def _check_heartbeats(self, now: float) -> None:
        runs_steps = len(self.worker_facts) == len(self._workers) and not self._in_call
        limit = _heartbeat_timeout(self._timeout, runs_steps)
        for number, last_seen in enumerate(self._last_seen):
            if now - last_seen > limit:
                self.fail(RankFailure(f"{self._workers[number].name} has not answered for {limit:g} s"))
                return


class LeaderConnection:
    """Another rank's view of the leader: receives its messages and exchanges heartbeats on a thread.

    The rank's other threads may block in a collective forever, so this thread ends the whole process when the leader has ended.

    Args:
        channel: to the leader.
        rank_timeout: seconds without a message after which a leader that has built its engine counts as hung.
    """

    def __init__(self, channel: Channel, rank_timeout: float) -> None:
        self.messages: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._channel = channel
        self._timeout = rank_timeout
        self._leader_ready = False  # the leader has built its engine, and runs no control call
        threading.Thread(target=self._receive_loop, name="torchweave-leader-connection", daemon=True).start()

    def report_joined(self) -> None:
        """Report that this rank is about to join the process groups."""
        self._channel.send(MessageKind.JOINED)

    def report_built(self, facts: dict[str, Any]) -> None:
        """Report that this rank has built its engine."""
        self._channel.send(MessageKind.BUILT, pickle.dumps(facts))

    def answer(self, kind: bytes, payload: bytes) -> None:
        """Send this rank's answer to the last message, see `WorkerGroup.answers`."""
        self._channel.send(kind, payload)

    def report_failure(self, sentence: str, user_error: bool) -> None:
        """Report why this rank ends; `user_error`: because of an unsupported option or model."""
        self._channel.send(MessageKind.FAILED, pickle.dumps((user_error, sentence)))

    def _receive_loop(self) -> None:
        last_seen, last_heartbeat = time.monotonic(), 0.0
        while True:
            try:
                while self._channel.poll(HEARTBEAT_SECONDS):
                    kind, payload = self._channel.receive()
                    last_seen = time.monotonic()
                    if kind != MessageKind.ALIVE:
                        if kind in (MessageKind.STEP, MessageKind.CALL):
                            self._leader_ready = kind == MessageKind.STEP
                        self.messages.put((kind, payload))
                    if kind == MessageKind.END:
                        return
                    if last_seen - last_heartbeat >= HEARTBEAT_SECONDS:
                        self._channel.try_send(MessageKind.ALIVE)
                        last_heartbeat = last_seen
            except (EOFError, OSError):
                os._exit(1)
            last_heartbeat = time.monotonic()
            self._channel.try_send(MessageKind.ALIVE)
            if last_heartbeat - last_seen > _heartbeat_timeout(self._timeout, self._leader_ready):
                os._exit(1)


def _heartbeat_timeout(rank_timeout: float, runs_steps: bool) -> float:
    return rank_timeout if runs_steps else max(rank_timeout, BUILD_TIMEOUT_SECONDS)


HEARTBEAT_SECONDS = 0.5
"""Interval of heartbeats."""
BUILD_TIMEOUT_SECONDS = 60.0
"""Least heartbeat timeout while ranks build or run a control call: a library may hold the interpreter lock for long."""


class MessageKind:
    """First byte of a message: the first line from the leader, the second from other ranks, `ALIVE` (heartbeat) from both."""

    TASK, STEP, IMAGE, CALL, IDLE, ALIVE, END = b"t", b"s", b"i", b"c", b"r", b"a", b"e"
    JOINED, BUILT, FAILED, DIGEST, ANSWER = b"j", b"b", b"f", b"d", b"w"


class Channel:
    """Sends from any thread, receives on one.

    Args:
        connection: a connected socket with the message framing of `multiprocessing.connection`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        if self._socket.family != socket.AF_UNIX:  # send a step before the previous one is acknowledged
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a message; blocks only while the socket's buffer is full.

        Raises:
            OSError: the other end is closed.
        """
        with self._lock:
            self._connection.send_bytes(kind + payload)

    def try_send(self, kind: bytes) -> None:
        """Send a message without payload if that does not block; drop it otherwise, and when the other end is closed."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if select.select([], [self._socket], [], 0)[1]:
                self._connection.send_bytes(kind)
        except (OSError, ValueError):
            pass
        finally:
            self._lock.release()

    def poll(self, seconds: float) -> bool:
        """Wait at most `seconds` for a message or the end of the connection; return whether either came."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[bytes, bytes]:
        """Return kind and payload of the next message.

        Raises:
            EOFError, OSError: the other end is closed.
        """
        message = self._connection.recv_bytes()
        return message[:1], message[1:]

    def clear_receive_timeout(self) -> None:
        """Remove the receive timeout of the socket."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

    def fileno(self) -> int:
        return self._connection.fileno()

    def abort(self) -> None:
        """Shut the connection down for both ends, even while another thread blocks in `send`."""
        with contextlib.suppress(OSError):  # already shut down
            self._socket.shutdown(socket.SHUT_RDWR)
