"""Message channel between the leader and another rank: each message is a kind (one byte) and a payload.

Both ends are on one machine (a socket pair) or on two (TCP, authenticated by a shared secret).
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
"""Interval of heartbeats."""
BUILD_TIMEOUT_SECONDS = 60.0
"""Least heartbeat timeout while ranks build, since a library may hold the interpreter lock for long."""


class MessageKind:
    """First byte of a message: the first line from the leader, the second from other ranks, `ALIVE` (heartbeat) from both."""

    TASK, STEP, IDLE, ALIVE, END = b"t", b"s", b"r", b"a", b"e"
    JOINED, BUILT, FAILED, DIGEST = b"j", b"b", b"f", b"d"


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

    def try_send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a short message if that does not block; drop it otherwise, and when the other end is closed."""
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
