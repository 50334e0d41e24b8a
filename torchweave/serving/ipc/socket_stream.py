"""Messages from an engine to an HTTP process over a Unix socket: whoever has something to say writes it, the event loop reads it.

Between the two no other thread stands. Each thread that has to wake up to hand a message on takes a tenth of a millisecond, and on
a virtual machine one time in a hundred a whole one, which every stream of that process sees (decision 0106).
"""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

_SIZE = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
_CONNECT_RETRY_SECONDS = 0.02  # between two looks whether the other process listens


class Sender:
    """Writes messages, of any thread, and never waits for the reader: what the socket does not take is written by a thread.

    Args:
        path: of the socket at which the reader listens, or will listen.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        self._pending: deque[bytes] = deque()
        self._writing = False
        self._closed = False
        with self._lock:
            self._start_writer_thread()

    def send(self, message: bytes) -> None:
        """Send a message behind those before it; nothing once it is closed, or the reader is gone."""
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
        """See to it that all was sent, for as long as that takes at most."""
        with self._lock:
            self._lock.wait_for(lambda: not self._writing, seconds)
            self._closed = True
            if self._socket is not None:
                self._socket.close()

    def _write(self, data: bytes) -> int:
        """How many bytes the socket takes; all where nobody is left to read them."""
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
                    rest = first[self._write(first) :]
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
        found = socket.socket(socket.AF_UNIX)
        while not self._closed:
            try:
                found.connect(self._path)
            except OSError:
                time.sleep(_CONNECT_RETRY_SECONDS)
            else:
                found.setblocking(False)
                self._socket = found
                return
        found.close()


def _wait_until_writable(into: socket.socket) -> None:
    waiting = select.poll()
    waiting.register(into, select.POLLOUT)
    waiting.poll(1000)


class FrameDecoder:
    """Splits a stream of bytes into the messages that a `Sender` framed."""

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that `data` completes."""
        data, begin = self._incomplete + data if self._incomplete else data, 0
        while len(data) - begin >= _SIZE.size:
            end = begin + _SIZE.size + _SIZE.unpack_from(data, begin)[0]
            if end > len(data):
                break
            yield data[begin + _SIZE.size : end]
            begin = end
        self._incomplete = data[begin:]


class Reader(asyncio.Protocol):
    """Calls `on_message` with each message that a `Sender` sends.

    Attributes:
        ended: done when the sender has closed and all of it was heard; with the error that `on_message` has raised.
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
        """See `asyncio.Protocol`; how the sender ended does not matter."""
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
    """A socket at which a `Sender` is expected."""
    listening = socket.socket(socket.AF_UNIX)
    listening.setblocking(False)
    listening.bind(path)
    listening.listen()
    return listening


async def read(listening: socket.socket, on_message: Callable[[bytes], None]) -> None:
    """Hear the first that comes until it closes. Raises what `on_message` raises."""
    loop = asyncio.get_running_loop()
    connected, _ = await loop.sock_accept(listening)
    transport, reader = await loop.connect_accepted_socket(lambda: Reader(on_message), connected)
    try:
        await reader.ended
    finally:
        transport.close()


def receive(listening: socket.socket) -> Iterator[bytes]:
    """Yield the messages of all senders, in order for each of them. Blocks while there are none; never ends."""
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
