"""Listening sockets, and uvicorn as configured in every HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from torchweave.config.options import ServerConfig
from torchweave.utils.malloc import return_large_allocations

_CLOSE_SECONDS = 5  # for connections to receive their last data
_KEEP_ALIVE_SECONDS = 75  # longer than the keep-alive time of proxies
_HEAD_SECONDS = 15.0  # time limit for receiving a request's head
_HEAD_BYTES = 2**16  # limit for a request's head, and for data after its body
_BACKLOG = 2048  # connections that wait for accept
_CORES_PER_PROCESS, _MAX_PROCESSES = 4, 4  # default number of HTTP processes


class _Http10Cycle(RequestResponseCycle):
    """HTTP/1.0 has no chunked encoding: a response without a length (a stream) ends when its connection is closed."""

    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._ends_with_connection = all(name.lower() != b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = False if self._ends_with_connection else None
        elif self._ends_with_connection:
            self.expected_content_length = len(message["body"])  # satisfies uvicorn's length check
        await super().send(message)


class _Connections(ServerState):
    """The connections of a process, of which those without a whole request may be closed.

    Args:
        max_per_address: most connections of a client address; None: any number.
    """

    def __init__(self, max_per_address: int | None) -> None:
        super().__init__()
        self._max_per_address = max_per_address
        self._per_address: Counter[str] = Counter()
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # the rest is for the engines and files
        self._waiting: dict[_Http1Protocol, None] = {}

    def on_connected(self, protocol: _Http1Protocol) -> None:
        """Close `protocol` if its address has too many, or the one that has waited longest if the process has too many."""
        address = protocol.client[0] if protocol.client else ""
        self._per_address[address] += 1
        self._waiting[protocol] = None
        if address and self._max_per_address is not None and self._per_address[address] > self._max_per_address:
            protocol.transport.abort()
        elif 0 < self._limit < len(self.connections):
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()

    def on_request(self, protocol: _Http1Protocol) -> None:
        """A whole request was received."""
        self._waiting.pop(protocol, None)

    def on_response(self, protocol: _Http1Protocol) -> None:
        """It was answered: the connection waits for another."""
        if protocol in self.connections:
            self._waiting[protocol] = None

    def on_lost(self, protocol: _Http1Protocol) -> None:
        self._waiting.pop(protocol, None)
        address = protocol.client[0] if protocol.client else ""
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]


class _Http1Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with four fixes.

    It ignores requests to upgrade the protocol, which Java's client sends first: the parser stops after the head of such a
    request, and uvicorn would lose the body. It sends no chunks to HTTP/1.0 clients. It closes connections whose request head
    exceeds `_HEAD_BYTES`, which uvicorn would buffer without limit, or takes longer than `_HEAD_SECONDS`.
    """

    server_state: _Connections
    _head_bytes = 0  # received since the last body part, end of a head or end of a request
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()
        self.server_state.on_connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.server_state.on_lost(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.server_state.on_response(self)
        super().on_response_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the head of a request that is sent ahead
            self._start_head_timer()
        elif self._head_bytes:
            self.send_400_response(f"The head of the request did not arrive within {_HEAD_SECONDS:g} seconds.")
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[self._read(remaining) :]
        except httptools.HttpParserError:
            sentence = "Invalid HTTP request received."
            self.logger.warning(sentence)
            self.send_400_response(sentence)
            return
        if self._head_bytes and self._head_timer is None:
            self._start_head_timer()
        if self._head_bytes > _HEAD_BYTES:
            self.send_400_response(f"The head of the request is longer than {_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._stop_head_timer()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _Http10Cycle  # uvicorn's class is not configurable

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self.server_state.on_request(self)
        super().on_message_complete()

    def _read(self, data: memoryview) -> int:
        """Parse data; returns the number of bytes that were consumed."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._should_upgrade():
                self._reparse_without_upgrade()
                return stop.args[0]
        return len(data)

    def _should_upgrade(self) -> bool:
        """Whether the parser stopped at an upgrade header, for which uvicorn starts no request; it stops after CONNECT as well."""
        return self.parser.get_method() != b"CONNECT"

    def _reparse_without_upgrade(self) -> None:
        """Parse the head again without the upgrade header."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode("ascii"))
        headers = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        # A new parser, configured as in uvicorn: the old one parses nothing more if the connection is to be closed.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([line, *headers, b"", b""]))


def _is_fault(record: logging.LogRecord) -> bool:
    """Filter out requests cancelled at the server's end, which uvicorn logs in another line too."""
    return record.exc_info is None or record.exc_info[0] is not asyncio.CancelledError


class UvicornServer(uvicorn.Server):
    """uvicorn without signal handlers: a signal starts the drain, it does not close the socket.

    Args:
        max_connections_per_address: most open connections of a client address; None: any number.
        tls: see `tls_options`.

    Attributes:
        listening: set once connections are accepted.
    """

    def __init__(self, app: Any, max_connections_per_address: int | None = None, **tls: Any) -> None:
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
                **tls,
            )
        )
        self.server_state = _Connections(max_connections_per_address)
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def runner(self) -> asyncio.Runner:
        """Create a runner for uvicorn's event loop, whose process reads large bodies."""
        return_large_allocations()
        return asyncio.Runner(loop_factory=self.config.get_loop_factory())


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Open a listening socket at an address that no other server uses; with `shared`, further HTTP processes of this server can
    `join`, and the kernel distributes connections among them.

    Raises:
        ValueError: the address is invalid or in use.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} must be from 0 to 65535; 0 chooses a free port")
    try:
        # Listen at once: several servers can bind to the same address until one of them listens.
        listening = _bind(host, port, shared=False, listens=True)
        if not shared:
            return listening
        # After bind: set before, it would let other servers share the address.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = listening.getsockname()[1]
        with contextlib.suppress(OSError), join(host, port):
            return listening
        listening.close()  # gVisor requires the option before bind
        return _bind(host, port, shared=True, listens=True)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from None


def listen_at(path: str) -> socket.socket:
    """Open a listening Unix socket; one that a server left at `path` is replaced.

    Raises:
        ValueError: another server listens there, or the path cannot be used.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError(errno.EADDRINUSE, "a server listens there")
            Path(path).unlink()
        listening.bind(path)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot listen at uds={path}: {error.strerror or error}; choose another path") from None
    return listening


def tls_options(settings: ServerConfig) -> dict[str, Any]:
    """uvicorn's options for HTTPS; empty for HTTP.

    Raises:
        ValueError: a file cannot be read or holds no key or certificate.
    """
    if settings.ssl_certfile is None:
        return {}
    options = {
        "ssl_keyfile": settings.ssl_keyfile,
        "ssl_certfile": settings.ssl_certfile,
        "ssl_ca_certs": settings.ssl_ca_certs,
        "ssl_cert_reqs": settings.ssl_cert_reqs,
    }
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError too
        why = error.strerror or str(error)
        raise ValueError(
            f"ssl_certfile={settings.ssl_certfile} with ssl_keyfile={settings.ssl_keyfile} cannot be used: {why}; give a "
            "certificate and its key as PEM files"
        ) from None
    return options


def join(host: str, port: int) -> socket.socket:
    """Bind a further socket to a shared address. It gets no connections until it listens."""
    return _bind(host, port, shared=True, listens=False)


def num_http_processes(requested: int | None, one_address: bool = False) -> int:
    """Resolve the number of HTTP processes of a server.

    Args:
        one_address: the address cannot be shared: a Unix socket, or one with TLS, which the other processes' proxy does not speak.

    Raises:
        ValueError: the system does not support more than one.
    """
    if one_address:
        return 1
    if sys.platform != "linux":  # other systems do not distribute connections among sockets of one address
        if requested is not None and requested > 1:
            raise ValueError(f"api_server_count={requested} is supported on Linux only; leave it out")
        return 1
    return requested or min(max(len(os.sched_getaffinity(0)) // _CORES_PER_PROCESS, 1), _MAX_PROCESSES)


def _bind(host: str, port: int, shared: bool, listens: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        if listens:
            bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound
