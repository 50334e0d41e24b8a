"""One end of the connection between the leader and another rank: messages, each a letter and bytes.

Both ends are on one machine (a pair of sockets) or on two (TCP, with a secret that both know).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from multiprocessing.connection import Connection

HEARTBEAT_SECONDS = 0.5
"""Seconds between two signs of life."""
BUILD_TIMEOUT_SECONDS = 60.0
"""Seconds of silence that are no fault while ranks build: a library may hold the interpreter for long."""

# From the leader.
TASK, STEP, IDLE, ALIVE, END = b"t", b"s", b"r", b"a", b"e"
# From the others; `ALIVE` too.
JOINED, BUILT, FAILED, DIGEST = b"j", b"b", b"f", b"d"


class Channel:
    """Sends from any thread, receives on one.

    Args:
        connection: a connected socket, as `multiprocessing.connection` frames its messages.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        if self._socket.family != socket.AF_UNIX:  # a step must not wait until the one before it was acknowledged
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a message; waits only where the other end has not read for long.

        Raises:
            OSError: there is no other end any more.
        """
        with self._lock:
            self._connection.send_bytes(kind + payload)

    def try_send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a short message if that can be done at once; else, or where nobody is there, nothing happens."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if select.select([], [self._socket], [], 0)[1]:
                self._connection.send_bytes(kind + payload)
        except (OSError, ValueError):
            pass
        finally:
            self._lock.release()

    def poll(self, seconds: float) -> bool:
        """Whether something can be received within so many seconds."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[bytes, bytes]:
        """The next message: its letter and the rest.

        Raises:
            EOFError, OSError: there is no other end any more.
        """
        message = self._connection.recv_bytes()
        return message[:1], message[1:]

    def clear_receive_timeout(self) -> None:
        """Let reading take as long as it takes again."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

    def fileno(self) -> int:
        return self._connection.fileno()

    def abort(self) -> None:
        """Break the connection, also under a thread that waits in `send`; both ends see its end."""
        with contextlib.suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_RDWR)
