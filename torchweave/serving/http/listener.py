"""How an HTTP process listens: its socket, and uvicorn as every one of them runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_CLOSE_SECONDS = 5  # for connections to take in what was said to them last
_KEEP_ALIVE_SECONDS = 75  # longer than what proxies keep their end open
_HEAD_BYTES = 2**16  # of a request's head, or of what stands behind its body
_BACKLOG = 2048  # connections that wait to be taken
_CORES_EACH, _MOST = 4, 4  # for an HTTP process, where nobody says how many there should be; so many at the most


class _Http10Cycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer without a length, as a stream is, ends with its connection."""

    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._ends_with_connection = all(name.lower() != b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = False if self._ends_with_connection else None
        elif self._ends_with_connection:
            self.expected_content_length = len(message["body"])  # so that uvicorn finds it to be whole
        await super().send(message)


class _Http1Protocol(HttpToolsProtocol):
    """Stays with HTTP/1.1 where a client offers to go over to another protocol, as Java's does with its first request: the offer
    is ignored. The parser stops behind the head of such a request, and uvicorn would lose the body.

    To HTTP/1.0 it speaks no chunks, and it hangs up on a head without end, which uvicorn would keep in memory whoever sent it.
    """

    _head_bytes = 0  # since a body or the end of a head or of a request came

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        left = memoryview(data)
        try:
            while left:
                left = left[self._read(left) :]
        except httptools.HttpParserError:
            said = "Invalid HTTP request received."
            self.logger.warning(said)
            self.send_400_response(said)
            return
        if self._head_bytes > _HEAD_BYTES:
            self.send_400_response(f"The head of the request is longer than {_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _Http10Cycle  # uvicorn leaves no choice of what it makes

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _read(self, data: memoryview) -> int:
        """How much of it has been read."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._should_upgrade():
                self._reparse_without_upgrade()
                return stop.args[0]
        return len(data)

    def _should_upgrade(self) -> bool:
        """Whether the parser stops at an offer: uvicorn begins no request then. It stops behind CONNECT as well."""
        return self.parser.get_method() != b"CONNECT"

    def _reparse_without_upgrade(self) -> None:
        """Read the head once more, without the offer."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode("ascii"))
        kept = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        # A new parser: the old one reads no more where the connection is to be closed. It is set up as uvicorn does it.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([line, *kept, b"", b""]))


def _is_fault(record: logging.LogRecord) -> bool:
    """Whether it is more than that a request was cut when the server ended, which is told in a line of its own."""
    return record.exc_info is None or record.exc_info[0] is not asyncio.CancelledError


class UvicornServer(uvicorn.Server):
    """uvicorn without signal handlers: a signal begins the drain, it does not close the door.

    Attributes:
        listening: set once connections are taken.
    """

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Http1Protocol,
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def runner(self) -> asyncio.Runner:
        """For an event loop as this server wants it."""
        return asyncio.Runner(loop_factory=self.config.get_loop_factory())


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket that listens at an address, which no other server has; with `shared` other HTTP processes of this one can `join`,
    and the kernel gives each connection to one of them.

    Raises:
        ValueError: the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} must be from 0 to 65535; 0 takes one that is free")
    try:
        # It listens at once: until one does, any number of servers can bind a socket to the address.
        found = _bind(host, port, shared=False, listens=True)
        if not shared:
            return found
        # Only now: with it from the beginning, another server could share the address too.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = found.getsockname()[1]
        with contextlib.suppress(OSError), join(host, port):
            return found
        found.close()  # gVisor lets only those share an address who said so before they were bound
        return _bind(host, port, shared=True, listens=True)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be listened on: {error.strerror}; choose another host or port"
        ) from None


def join(host: str, port: int) -> socket.socket:
    """A further socket for an address that is shared. It is given no connections before it listens."""
    return _bind(host, port, shared=True, listens=False)


def num_http_processes(requested: int | None) -> int:
    """How many HTTP processes a server has here.

    Raises:
        ValueError: several cannot be had on this system.
    """
    if sys.platform != "linux":  # elsewhere connections are not spread over the sockets of one address
        if requested is not None and requested > 1:
            raise ValueError(f"api_server_count={requested} can be had on Linux only; leave it out")
        return 1
    return requested or min(max(len(os.sched_getaffinity(0)) // _CORES_EACH, 1), _MOST)


def _bind(host: str, port: int, shared: bool, listens: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
        if listens:
            found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    return found
