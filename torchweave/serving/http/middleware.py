"""Middleware before the routes: API keys, body limits, fast path, request ids, HEAD; plain ASGI, so streams pass unbuffered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import inspect
import ipaddress
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from torchweave.config.options import ServerConfig, read_text_file
from torchweave.serving.anthropic.builder import anthropic_error
from torchweave.serving.engine_client.admission_pacer import AdmissionPacer
from torchweave.serving.engine_client.request_stream import EngineUnavailable
from torchweave.serving.errors import ApiError, api_error
from torchweave.serving.http.bodies import LONG_BODY, on_thread, read_body
from torchweave.serving.metrics.prometheus import HttpRequestCounters
from torchweave.serving.request_warnings import HEADER as WARNING_HEADER
from torchweave.serving.request_warnings import RequestWarnings, WarningCounts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Value = TypeVar("Value")

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/version", "/docs", "/openapi.json"})
"""Accessible without a key."""
REQUEST_ID = "torchweave.request_id"
"""Scope key of the request id, which the response's header and body contain."""
WARNINGS = "torchweave.warnings"
"""Scope key of the request's warnings, which the response's header contains."""
STREAM_SEND = "torchweave.send"
"""Scope key of a `send` that bypasses the middleware, for body parts after the response's start."""
CLIENT = "torchweave_client"
"""Key in `scope` of who sent the request: a digest of the API key, or the address where no key is required."""
PROXIED = "torchweave.relayed"
"""Scope key of requests that another HTTP process answers and counts."""
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a disconnected client; used in logs and metrics only
_CLIENT_ID = re.compile(rb"[!-~]{1,128}")
_JSON_TYPE = re.compile(rb"\s*application/(?:[^;\s]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::\d*)?")
_LARGE_BODY = 1 << 20  # bytes; after such bodies, cycles are collected
_COLLECT_SECONDS = 2.0
_BODY_SECONDS = 60.0  # time limit for receiving a body


def read_keys(settings: ServerConfig) -> list[str]:
    """Read the valid API keys; empty: no key is required.

    Raises:
        ValueError: the file cannot be read or contains no key, or a key is empty.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        text = read_text_file("api_key_file", settings.api_key_file)
        file_keys = [line.strip() for line in text.splitlines() if line.strip()]
        if not file_keys:
            raise ValueError(f"api_key_file {settings.api_key_file} contains no key; write one key per line")
        keys += file_keys
    if not all(key.strip() for key in keys):
        raise ValueError("api_key is empty; leave it out to require no key")
    return keys


def load_middleware(path: str) -> Any:
    """Import middleware by its path: an ASGI class, or a coroutine function of a request and `call_next`.

    Raises:
        ValueError: it cannot be imported or is neither.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        own = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"middleware={path} cannot be imported: {error}") from None
    if not (isinstance(own, type) or inspect.iscoroutinefunction(own)):
        raise ValueError(f"middleware={path} is neither a class nor a coroutine function of a request and call_next")
    return own


class HttpMiddleware(ABC):
    """ASGI middleware for HTTP requests; passes all others, such as the lifespan, to `app`."""

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, scope: Any, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._handle if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        """Handle a request."""


class RootPathMiddleware(HttpMiddleware):
    """Removes the prefix of a proxy that passes it on, and names it for the links of pages."""

    def __init__(self, app: App, root_path: str) -> None:
        super().__init__(app)
        self._root_path = root_path

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        root = self._root_path
        scope = {**scope, "root_path": root}
        if f"{scope['path']}/".startswith(f"{root}/"):
            scope["path"] = scope["path"][len(root) :] or "/"
            scope["raw_path"] = scope.get("raw_path", b"")[len(root) :] or b"/"
        await self._app(scope, receive, send)


class HttpMetricsMiddleware(HttpMiddleware):
    """Counts finished requests. Status 499 (from nginx): the client disconnected before the response."""

    def __init__(self, app: App, counts: HttpRequestCounters) -> None:
        super().__init__(app)
        self._counts = counts

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        status = CLIENT_CLOSED_REQUEST
        scope[STREAM_SEND] = send

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except Exception:
            status = 500 if status == CLIENT_CLOSED_REQUEST else status
            raise
        finally:
            # Breaks the reference cycle of scope and `send`, which only the garbage collector would free.
            del scope[STREAM_SEND]
            if not scope.get(PROXIED):
                self._counts.count(scope, status)


class AuthLimitsMiddleware(HttpMiddleware):
    """Checks a request's API key and body, and passes it to `app` with the body read.

    Args:
        keys: valid keys for paths outside `OPEN_PATHS`; empty: no key is required.
        admission_pacer: paces requests with a body.
    """

    def __init__(self, app: App, settings: ServerConfig, keys: list[str], admission_pacer: AdmissionPacer) -> None:
        super().__init__(app)
        self._admission_pacer = admission_pacer
        self._settings = settings
        self._digests = [_digest(key.encode()) for key in keys]
        self._collection: asyncio.TimerHandle | None = None

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
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
        if len(body) > _LARGE_BODY and self._collection is None:
            self._collection = asyncio.get_running_loop().call_later(_COLLECT_SECONDS, self._collect)
        await self._app(scope, replay(body, receive), send)

    def _collect(self) -> None:
        """Collect reference cycles that hold large bodies, such as tracebacks of rejected requests: one such request creates too
        few objects for an automatic collection."""
        self._collection = None
        gc.collect()

    def _check_key(self, scope: Any) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        if not self._digests:
            self._check_host(scope)
            scope[CLIENT] = (scope.get("client") or ("",))[0]
            return
        given = header(scope, b"authorization")
        if not given and (anthropic_key := header(scope, b"x-api-key")):
            given = b"Bearer " + anthropic_key
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        # Constant time: every key is compared in full.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() == b"bearer" and any(matches):
            scope[CLIENT] = digest.hex()
            return
        problem = "The API key is unknown" if given else "The API key is missing"
        sentence = f"{problem}; send a key of this server as `Authorization: Bearer KEY` or `x-api-key: KEY`."
        raise ApiError(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_host(self, scope: Any) -> None:
        """Refuse requests for a foreign name: a page of that name may have it resolved to this machine (DNS rebinding)."""
        settings = self._settings
        if not _is_loopback(settings.host) or "*" in settings.allowed_hosts:
            return
        given = header(scope, b"host").decode("latin-1").lower()
        name = _host_name(given)
        known = (settings.host, *settings.allowed_hosts)
        if not name or _is_loopback(name) or _is_ip_address(name) or name in (each.lower() for each in known):
            return
        raise ApiError(
            403,
            f"This server takes no requests for the host {name[:100]!r}; send them to {settings.host}, or start the server "
            "with allowed_hosts or an API key.",
            code="host_not_allowed",
        )

    async def _body(self, scope: Any, receive: Receive) -> bytes | None:
        """Read the whole body; None if the method has none."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return None
        _check_encoding(scope)
        limit = self._settings.max_body_bytes
        length = header(scope, b"content-length")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_long(limit)
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientDisconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_long(limit)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            sentence = f"The body did not arrive within {_BODY_SECONDS:g} seconds; send it faster."
            raise ApiError(408, sentence, headers={"Connection": "close"}) from None


class FastPathMiddleware(HttpMiddleware):
    """Inside `AuthLimitsMiddleware` (which has read the body) that reads bodies of JSON and calls a route's function directly.

    FastAPI's routing would double the cost of a request, and read long bodies in the event loop. It still has the routes: it
    documents them, and answers requests of other media types.

    Args:
        routers: their `POST` routes with the arguments `body` and `request` are called.
        max_body_bytes: limit for a body.
    """

    def __init__(self, app: App, routers: Sequence[APIRouter], max_body_bytes: int) -> None:
        super().__init__(app)
        self._max_body_bytes = max_body_bytes
        self._routes: dict[str, tuple[APIRoute, TypeAdapter[Any]]] = {
            route.path: (route, TypeAdapter(get_type_hints(route.endpoint, include_extras=True)["body"]))
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and "body" in route.endpoint.__annotations__
        }

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        match = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if match is None or not _JSON_TYPE.match(header(scope, b"content-type")):
            await self._app(scope, receive, send)
            return
        route, kind = match
        scope["route"] = route
        body = (await receive())["body"]
        try:
            if len(body) <= LONG_BODY:
                request_body = read_body(body, kind, self._max_body_bytes)
            else:
                reading = on_thread(len(body), partial(read_body, body, kind, self._max_body_bytes))
                request_body = await cancel_on_disconnect(reading, receive)
                if request_body is None:
                    return
            response = await route.endpoint(request_body, Request(scope, receive))
        except (ApiError, EngineUnavailable, ValueError) as error:
            response = api_error(error).response
        await response(scope, receive, send)


class RequestIdMiddleware(HttpMiddleware):
    """Returns the request id, the client's own if it sent one, in `x-request-id`, and the request's warnings in a header."""

    def __init__(self, app: App, warning_counts: WarningCounts) -> None:
        super().__init__(app)
        self._warning_counts = warning_counts

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        client_id = header(scope, b"x-request-id")
        request_id = client_id if _CLIENT_ID.fullmatch(client_id) else uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode()
        warnings = scope[WARNINGS] = RequestWarnings(self._warning_counts)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if not any(name == b"x-request-id" for name, _ in headers):  # set by the first process if proxied
                    headers.append((b"x-request-id", request_id))
                if warnings.sentences:
                    headers.append((WARNING_HEADER, warnings.header))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, with_id)


class AnthropicErrorsMiddleware(HttpMiddleware):
    """Rewrites the errors of `/v1/messages` from OpenAI's form to Anthropic's."""

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/v1/messages"):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        parts: list[bytes] = []

        async def rewriting_send(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    body = anthropic_error(b"".join(parts), start["status"], scope[REQUEST_ID])
                    headers = [each for each in start["headers"] if each[0] != b"content-length"]
                    headers.append((b"content-length", b"%d" % len(body)))
                    await send({**start, "headers": headers})
                    await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, rewriting_send)


class HeadMethodMiddleware(HttpMiddleware):
    """Answers HEAD (`wget --spider`, `curl -I`) as GET without the body; the routes support GET only."""

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # A copy: uvicorn reads the method from its scope.
        await self._app({**scope, "method": "GET"}, receive, without_body)


def _check_encoding(scope: Any) -> None:
    encoding = header(scope, b"content-encoding").strip().lower()
    if encoding not in (b"", b"identity"):
        name = encoding.decode("latin-1")[:40]
        raise ApiError(415, f"Content-Encoding {name!r} is not supported; send plain JSON.")


class _ClientDisconnected(Exception):
    """The client disconnected."""


def replay(body: bytes, receive: Receive) -> Receive:
    """Create a `receive` callable that returns `body` once more."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


async def cancel_on_disconnect(work: Coroutine[Any, Any, Value], receive: Receive) -> Value | None:
    """Return the result of `work`, or None if the client disconnects first."""
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_long(limit: int) -> ApiError:
    sentence = f"The body is longer than the {limit} bytes that this server accepts; send a shorter one."
    return ApiError(413, sentence, headers={"Connection": "close"})


def header(scope: Any, name: bytes) -> bytes:
    """Value of a header by its lower-case name; empty if absent."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return b""


def _host_name(given: str) -> str:
    """The name or address in a `Host` header, without a port; a malformed one as it is given."""
    match = _HOST.fullmatch(given)
    return (match[1] or match[2]) if match else given


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return _is_ip_address(host) and ipaddress.ip_address(host).is_loopback


def _is_ip_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
