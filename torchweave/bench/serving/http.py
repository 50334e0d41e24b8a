"""A small HTTP/1.1 load client: persistent connections, parsing in C, bodies passed on as they arrive.

A connection carries one request at a time. Bodies are neither collected nor copied, since the client may share the machine with
the server. Arrival times are recorded before parsing; otherwise parsing of many streams would delay the last one's time.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[bytes, float], None]
"""Receives a part of a body and its arrival time (`time.perf_counter`)."""


class Connection(asyncio.Protocol):
    """A connection with its response parser; httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._status: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._received: list[tuple[bytes, float]] = []
        self._at = 0.0  # arrival time of the bytes being parsed
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._parse()
        self._fail(ConnectionError(f"the server closed the connection{f': {exc}' if exc else ''}"))

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send a request and return its status after the whole response; `on_body` receives each part on arrival."""
        assert self.transport is not None and self._status is None
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._on_body = asyncio.get_running_loop().create_future(), on_body
        self.transport.write(request)
        try:
            return await self._status
        finally:
            if not self._status.done() or self._status.cancelled():
                self.reusable = False  # the rest of the response is pending
            self._status = self._on_body = None

    def data_received(self, data: bytes) -> None:
        if not self._received:
            asyncio.get_running_loop().call_soon(self._parse)  # after all pending reads
        self._received.append((data, time.perf_counter()))

    def _parse(self) -> None:
        received, self._received = self._received, []
        try:
            for data, self._at in received:
                self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self.reusable = False
            self._fail(ConnectionError(f"the server sent an invalid response: {error}"))

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._at)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._status is not None and not self._status.done():
            self._status.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._status is not None and not self._status.done():
            self._status.set_exception(error)


class HttpClient:
    """Requests to one server.

    Args:
        base_url: `http://host:port`, optionally with a path prefix.
        api_key: bearer token; empty: none.
    """

    def __init__(self, base_url: str, api_key: str = "") -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url={base_url!r} is not valid: it takes http://HOST:PORT")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._head = f"Host: {name}:{self._port}\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")
        self._free: list[Connection] = []

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send a JSON request and return its status; `on_body` receives the response's bytes on arrival."""
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._exchange("POST", path, content, body, on_body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the whole response."""
        parts: list[bytes] = []
        status = await self._exchange("GET", path, "", b"", lambda part, _: parts.append(part))
        return status, b"".join(parts)

    async def _exchange(self, method: str, path: str, content: str, body: bytes, on_body: OnBody) -> int:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{content}\r\n".encode("latin-1")
        connection = await self._connection()
        try:
            return await connection.exchange(head + body, on_body)
        finally:
            if connection.reusable:
                self._free.append(connection)
            elif connection.transport is not None:
                connection.transport.close()

    async def _connection(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if connection.reusable and connection.transport is not None and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port, ssl=self._tls))[1]

    def close(self) -> None:
        for connection in self._free:
            if connection.transport is not None:
                connection.transport.close()
        self._free.clear()
