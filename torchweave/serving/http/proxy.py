"""Proxy to the first HTTP process, which handles pages, probes, metrics and invalid requests."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools

from torchweave.serving.errors import ApiError
from torchweave.serving.http.middleware import PROXIED, App, HttpMiddleware, Receive, Send, cancel_on_disconnect
from torchweave.serving.media import ResponseHandler

_HOP_BY_HOP_HEADERS = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"content-length", b"expect", b"date",
})  # fmt: skip
_READ_BYTES = 1 << 16


class ProxyMiddleware(HttpMiddleware):
    """Forwards every HTTP request to the first HTTP process and streams its response.

    Args:
        address: Unix socket of the first process.
    """

    def __init__(self, app: App, address: str) -> None:
        super().__init__(app)
        self._address = address

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        scope[PROXIED] = True
        bodyless = scope["method"] in ("GET", "HEAD", "OPTIONS")
        body = b"" if bodyless else (await receive())["body"]  # complete: `AuthLimitsMiddleware` has read it
        try:
            reader, writer = await asyncio.open_unix_connection(self._address)
        except OSError:
            sentence = "The server is shutting down; send the request to another server."
            await ApiError(503, sentence, code="shutting_down").response(scope, receive, send)
            return
        try:
            writer.write(_request(scope, body))
            await cancel_on_disconnect(_forward_response(reader, send), receive)
        finally:
            writer.close()


def _request(scope: Any, body: bytes) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [each for each in scope["headers"] if each[0] not in _HOP_BY_HOP_HEADERS]
    headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode("ascii"), target), *(b"%s: %s" % each for each in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def _forward_response(reader: asyncio.StreamReader, send: Send) -> None:
    response = ResponseHandler()
    parser = httptools.HttpResponseParser(response)
    started = False
    while not response.ended and (data := await reader.read(_READ_BYTES)):
        parser.feed_data(data)
        if response.head_complete and not started:
            started = True
            status = parser.get_status_code()
            hidden = _HOP_BY_HOP_HEADERS - {b"content-length"}
            headers = [each for each in response.headers if each[0] not in hidden]
            await send({"type": "http.response.start", "status": status, "headers": headers})
        if started and response.parts:
            body, response.parts = b"".join(response.parts), []
            await send({"type": "http.response.body", "body": body, "more_body": True})
    if not started:
        raise ConnectionError("the first HTTP process ended before it responded")
    await send({"type": "http.response.body", "body": b"", "more_body": False})
