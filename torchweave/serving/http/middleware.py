"""What stands before the routes: keys, and bodies that are too long or too slow. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from torchweave.config.options import ServerConfig, read_text_file
from torchweave.serving.engine_client.admission_pacer import AdmissionPacer
from torchweave.serving.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/docs", "/openapi.json"})
"""Asked by those who have no key."""
REQUEST_ID = "torchweave.request_id"
"""In a scope: what the request is called, in the header of its answer and in the answer's `id`."""
_GIVEN_ID = re.compile(rb"[!-~]{1,128}")
_BODY_SECONDS = 60.0  # in which a body has to arrive


def read_keys(settings: ServerConfig) -> list[str]:
    """The keys that clients may give; none: everybody may ask.

    Raises:
        ValueError: the file cannot be read, or holds none.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        text = read_text_file("api_key_file", settings.api_key_file)
        found = [line.strip() for line in text.splitlines() if line.strip()]
        if not found:
            raise ValueError(f"api_key_file {settings.api_key_file} holds no key; write one a line")
        keys += found
    if not all(key.strip() for key in keys):
        raise ValueError("api_key is empty; leave it out to let everybody ask")
    return keys


class AuthLimitsMiddleware:
    """Lets a request through to `app` with its body read, or answers it.

    Args:
        keys: any of these opens what is not in `OPEN_PATHS`; none: everything is open.
        admission_pacer: in which requests with a body are let through.
    """

    def __init__(self, app: App, settings: ServerConfig, keys: list[str], admission_pacer: AdmissionPacer) -> None:
        self._app = app
        self._admission_pacer = admission_pacer
        self._settings = settings
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        except _ClientDisconnected:
            return
        if body is None:
            await self._app(scope, receive, send)
            return
        await self._admission_pacer.wait()
        await self._app(scope, replay(body, receive), send)

    def _check_key(self, scope: Any) -> None:
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        given = header(scope, b"authorization")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, in a time that does not depend on where the first difference is.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() == b"bearer" and any(matches):
            return
        what = "The API key is not known here" if given else "There is no API key"
        sentence = f"{what}; send one that this server was started with, as `Authorization: Bearer KEY`."
        raise ApiError(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, scope: Any, receive: Receive) -> bytes | None:
        """The whole body; None where the method has none."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return None
        _check_encoding(scope)
        most = self._settings.max_body_bytes
        length = header(scope, b"content-length")
        if length.isdigit() and int(length[:20]) > most:
            raise _too_long(most)
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientDisconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise _too_long(most)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            sentence = f"The body did not arrive within {_BODY_SECONDS:g} seconds."
            raise ApiError(408, sentence, headers={"Connection": "close"}) from None


class RequestIdMiddleware:
    """ASGI middleware: each answer says in `x-request-id` what its request is called: the client's own name, where it gave one, so
    that what both sides have logged can be put together."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if not any(name == b"x-request-id" for name, _ in headers):  # of what another HTTP process has answered
                    message = {**message, "headers": [*headers, (b"x-request-id", request_id)]}
            await send(message)

        await self._app(scope, receive, with_id)


class HeadMethodMiddleware:
    """ASGI middleware next to the routes, which know GET alone: HEAD is the same without the body. Health checks and monitors ask
    so (`wget --spider`, `curl -I`)."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # A copy: the server, which made the scope, has to know what was asked.
        await self._app({**scope, "method": "GET"}, receive, without_body)


def _check_encoding(scope: Any) -> None:
    given = header(scope, b"content-encoding").strip().lower()
    if given not in (b"", b"identity"):
        name = given.decode("latin-1")[:40]
        raise ApiError(415, f"A body with Content-Encoding {name!r} is not read here; send it as plain JSON.")


class _ClientDisconnected(Exception):
    """The client is gone."""


def replay(body: bytes, receive: Receive) -> Receive:
    """`receive` of an application that reads the body again."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return left.pop() if left else await receive()

    return receive_again


def _too_long(most: int) -> ApiError:
    sentence = f"The body is longer than the {most} bytes that this server takes; send less."
    return ApiError(413, sentence, headers={"Connection": "close"})


def header(scope: Any, name: bytes) -> bytes:
    """The value of a header by its lower-case name; empty where there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
