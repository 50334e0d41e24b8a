"""Length-prefixed messages over Unix sockets between the server's processes.

The thread that produces a message writes it to the socket, and the event loop reads it: each additional thread on the way would
add 0.1 ms, and on a virtual machine 1 ms one time in a hundred, to the latency of every stream (decision 0106).
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import cast

_SIZE = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
_CONNECT_RETRY_SECONDS = 0.02  # until the other process listens


class Sender:
    """Writes messages without blocking; thread-safe. A background thread connects, and writes if the socket's buffer is full.

    Args:
        path: of the socket at which the reader listens, or will listen.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        self._pending: deque[bytes | memoryview] = deque()
        self._writing = False
        self._closed = False
        with self._lock:
            self._start_writer_thread()

    def send(self, message: bytes) -> None:
        """Send a message, in order; dropped after `close` or the reader's end."""
        framed = _SIZE.pack(len(message)) + message
        with self._lock:
            if self._closed:
                return
            if not self._writing:
                framed = framed[self._write(framed) :]
                if not framed:
                    return
                self._start_writer_thread()
            self._pending.append(framed)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` until all messages were written, then close."""
        with self._lock:
            self._lock.wait_for(lambda: not self._writing, seconds)
            self._closed = True
            if self._socket is not None:
                self._socket.close()

    def _write(self, data: bytes | memoryview) -> int:
        """Write as much as the socket accepts; returns the number of bytes, all of them if the reader is gone."""
        assert self._socket is not None
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._closed = True
            return len(data)

    def _start_writer_thread(self) -> None:
        self._writing = True
        threading.Thread(target=self._write_pending, name="torchweave-sender", daemon=True).start()

    def _write_pending(self) -> None:
        if self._socket is None:
            self._connect()
        while self._socket is not None:
            with self._lock:
                while self._pending and not self._closed:
                    first = self._pending[0]
                    rest = memoryview(first)[self._write(first) :]  # images are large: no copy of what is left
                    if rest:
                        self._pending[0] = rest
                        break
                    self._pending.popleft()
                else:
                    self._writing = False
                    self._lock.notify_all()
                    return
            _wait_until_writable(self._socket)

    def _connect(self) -> None:
        """Wait until the reader listens."""
        connection = socket.socket(socket.AF_UNIX)
        while not self._closed:
            try:
                connection.connect(self._path)
            except OSError:
                time.sleep(_CONNECT_RETRY_SECONDS)
            else:
                connection.setblocking(False)
                self._socket = connection
                return
        connection.close()


def _wait_until_writable(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.poll(1000)


class FrameDecoder:
    """Splits a stream of bytes into the messages that a `Sender` framed."""

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes."""
        data, begin = self._incomplete + data if self._incomplete else data, 0
        messages = []
        while len(data) - begin >= _SIZE.size:
            end = begin + _SIZE.size + _SIZE.unpack_from(data, begin)[0]
            if end > len(data):
                break
            messages.append(data[begin + _SIZE.size : end])
            begin = end
        self._incomplete = data[begin:]
        return messages


class Reader(asyncio.Protocol):
    """Calls `on_message` with each message of a `Sender`.

    Attributes:
        ended: done when the sender has closed and all its messages were read, or with the error that `on_message` raised.
    """

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._frames = FrameDecoder()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except Exception as error:  # decoding a malformed message may raise anything
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)
        if self._transport is not None:
            self._transport.close()


def listen(path: str) -> socket.socket:
    """Bind a socket for one or more `Sender`s, instead of one that a process has left that was killed."""
    listening = socket.socket(socket.AF_UNIX)
    listening.setblocking(False)
    with suppress(FileNotFoundError):
        os.unlink(path)
    listening.bind(path)
    listening.listen()
    return listening


async def read(listening: socket.socket, on_message: Callable[[bytes], None]) -> None:
    """Read the messages of the first sender that connects until it closes. Raises the errors of `on_message`."""
    loop = asyncio.get_running_loop()
    connected, _ = await loop.sock_accept(listening)
    transport, reader = await loop.connect_accepted_socket(lambda: Reader(on_message), connected)
    try:
        await reader.ended
    finally:
        transport.close()


def receive(listening: socket.socket) -> Iterator[bytes]:
    """Yield the messages of all senders, in order for each of them. Blocks between messages; never ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    selector.register(listening.accept()[0], selectors.EVENT_READ, FrameDecoder())
                    continue
                connected = cast(socket.socket, key.fileobj)
                if data := connected.recv(_RECEIVE_BYTES):
                    yield from key.data.feed(data)
                else:
                    selector.unregister(connected)
                    connected.close()
