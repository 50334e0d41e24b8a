"""Images at `http(s)` addresses: fetched from allowed hosts only, and never from a private address; and in files of one folder.

The name of a host is resolved once; every address that it has is checked, and the connection goes to a checked address, so a name
that resolves to another one a moment later changes nothing. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httptools

from torchweave.config.options import expand_path
from torchweave.images import has_images, image_url
from torchweave.serving.errors import ApiError

_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
"""Splitting a URL of megabytes takes seconds, which the event loop would wait."""
_MAX_FETCHES = 64
"""Images fetched at the same time by an HTTP process; further ones wait, within their time limit."""
_LOOKUP_THREADS = 4
_READ_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_SAFE = "/%:@!$&'()*+,;=~-._?"  # characters of a request target that are not quoted
_HOST = re.compile(r"[a-z0-9.-]+|[0-9a-f:.]+")
# IPv6 networks that reach IPv4 addresses: NAT64, 6to4, Teredo, and IPv4-compatible addresses
_TUNNELS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")))


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # with a zone, such as fe80::1%eth0
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.is_site_local or any(ip in tunnel for tunnel in _TUNNELS):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class MediaFetcher:
    """Replaces `http(s)` addresses of images in messages by what is there.

    Args:
        hosts: allowed hosts; `name` stands for ports 80 and 443, `name:port` for that port. Empty: nothing is fetched.
        max_bytes: most bytes of the images of a request together.
        seconds: time limit of all images of a request.
        folder: holds the files that `file://` addresses may name. None: no such address is read.

    Raises:
        ValueError: there is no such folder.
    """

    def __init__(self, hosts: Sequence[str], max_bytes: int, seconds: float, folder: str | None = None) -> None:
        self._folder = None if not folder else expand_path(folder).resolve()
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"allowed_local_media_path={folder} is no folder; give one that holds images")
        self._schemes = (("http://", "https://") if hosts else ()) + (("file://",) if self._folder is not None else ())
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._ssl: ssl.SSLContext | None = None
        self._slots = asyncio.Semaphore(_MAX_FETCHES)
        # Not the loop's threads, on which other requests wait for their grammars: a lookup may take long.
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="torchweave-lookup")

    async def resolve(self, messages: list[dict[str, Any]], max_images: int) -> list[dict[str, Any]]:
        """The messages with data URLs in place of addresses; `max_images`: of a conversation.

        Raises:
            ApiError: 400, an image is not allowed, or cannot be fetched within the limits.
        """
        if not self._schemes or not has_images(messages):
            return messages
        urls = list(dict.fromkeys(url for message in messages for url in self._addresses(message)))
        if not urls or len(urls) > max_images:  # the processor refuses too many by a sentence
            return messages
        budget = _Budget(self._max_bytes)
        tasks = [asyncio.create_task(self._fetch(url, budget)) for url in urls]
        try:
            async with asyncio.timeout(self._seconds):
                fetched = dict(zip(urls, await asyncio.gather(*tasks), strict=True))
        except TimeoutError:
            raise _refusal(f"took longer than {self._seconds:g} seconds (media_fetch_timeout)") from None
        finally:
            for task in tasks:
                task.cancel()
        return [self._replaced(message, fetched) for message in messages]

    async def _fetch(self, url: str, budget: _Budget) -> str:
        """The content of an address as a data URL."""
        if url[:7].lower() == "file://":
            content = await asyncio.get_running_loop().run_in_executor(self._lookups, self._read_file, url, budget)
            return _data_url(content)
        parts, host, port = self._checked(url)
        async with self._slots:
            return await self._fetch_from(parts, host, port, budget)

    async def _fetch_from(self, parts: SplitResult, host: str, port: int, budget: _Budget) -> str:
        address = await _resolve(host, port, self._lookups)
        context = self._context() if parts.scheme == "https" else None
        name = host if context is not None else None
        try:
            reader, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
        except (OSError, ssl.SSLError) as error:
            raise _refusal(f"cannot be fetched: no connection to {host} ({type(error).__name__})") from None
        try:
            writer.write(_request(parts, host, port))
            content = await _read(reader, budget)
        except (OSError, ssl.SSLError, httptools.HttpParserError) as error:
            raise _refusal(f"cannot be fetched: {host} answered no HTTP ({type(error).__name__})") from None
        finally:
            writer.transport.abort()
        return _data_url(content)

    def _read_file(self, url: str, budget: _Budget) -> bytes:
        """The content of a file below the folder, links resolved; the same refusal for any other, whether it exists or not."""
        assert self._folder is not None, "_schemes"
        refusal = _refusal("names no file that this server reads (allowed_local_media_path)")
        try:
            parts = urlsplit(url[:_MAX_URL_CHARS])
            path = Path(unquote(parts.path)).resolve()
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._folder) or not path.is_file():
                raise refusal
            budget.take(path.stat().st_size)
            return path.read_bytes()
        except (OSError, ValueError):
            raise refusal from None

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        """Split an address whose host is allowed."""
        if len(url) > _MAX_URL_CHARS:
            raise _refusal(f"has {len(url)} characters, but at most {_MAX_URL_CHARS} are allowed")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _refusal("is invalid") from None
        host = (parts.hostname or "").lower()
        if not _HOST.fullmatch(host) or parts.username is not None or parts.password is not None:
            raise _refusal("is invalid: it needs a host in ASCII, and no user name")
        usual = _PORTS[parts.scheme]
        allowed = {f"{host}:{port or usual}"} | ({host} if port in (None, usual) else set())
        if not allowed & self._hosts:
            raise _refusal(f"names the host {host[:80]!r}, which this server does not fetch from (allowed_media_hosts)")
        return parts, host, port or usual

    def _is_address(self, url: Any) -> bool:
        return isinstance(url, str) and url[:8].lower().startswith(self._schemes)

    def _addresses(self, message: Mapping[str, Any]) -> list[str]:
        content = message.get("content")
        urls = map(image_url, content) if isinstance(content, (list, tuple)) else ()
        return [url for url in urls if self._is_address(url)]

    def _replaced(self, message: dict[str, Any], fetched: Mapping[str, str]) -> dict[str, Any]:
        if not self._addresses(message):
            return message
        parts = [
            {"type": "image_url", "image_url": {"url": fetched[url]}}
            if self._is_address(url := image_url(part))
            else part
            for part in message["content"]
        ]
        return {**message, "content": parts}

    def _context(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl


class _Budget:
    """Bytes that the images of a request may still have."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.left = max_bytes

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise _refusal(
                f"has more bytes than allowed: {self.max_bytes} for all images of a request (max_body_bytes)"
            )


def _refusal(why: str) -> ApiError:
    return ApiError(400, f"The URL of an image {why}; send the image itself, as a data URL.", param="messages")


def _data_url(content: bytes) -> str:
    return "data:image/*;base64," + base64.b64encode(content).decode()


async def _resolve(host: str, port: int, threads: Executor) -> str:
    """The first IP address of a host; none of its addresses may be private."""
    try:
        lookup = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(threads, lookup)
    except (OSError, UnicodeError):
        raise _refusal(f"cannot be fetched: the host {host[:80]!r} is unknown") from None
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(map(is_public, addresses)):
        raise _refusal(
            f"names the host {host[:80]!r}, which has a private address; the server fetches from public ones"
        )
    return addresses[0]


def _request(parts: SplitResult, host: str, port: int) -> bytes:
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
    name = f"[{host}]" if ":" in host else host
    name += "" if port == _PORTS[parts.scheme] else f":{port}"
    head = f"GET {target} HTTP/1.1\r\nHost: {name}\r\nAccept: image/*\r\nAccept-Encoding: identity\r\n"
    return f"{head}User-Agent: torchweave\r\nConnection: close\r\n\r\n".encode("ascii")


class ResponseHandler:
    """Collects a response, as the callbacks of httptools' parser.

    Attributes:
        headers: with names in lower case.
        parts: of the body.
        head_complete, ended: the whole head, and the whole response, were parsed.
    """

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.head_complete = self.ended = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.head_complete = True

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.ended = True


async def _read(reader: asyncio.StreamReader, budget: _Budget) -> bytes:
    """The body of a response with status 200."""
    response = ResponseHandler()
    parser: Any = httptools.HttpResponseParser(response)
    head_bytes = 0
    while not response.ended and (data := await reader.read(_READ_BYTES)):
        parser.feed_data(data)
        if response.head_complete:
            status = parser.get_status_code()
            if status != 200:
                what = "a redirect, which is not followed" if 300 <= status < 400 else "no image"
                raise _refusal(f"cannot be fetched: it answered {what} (status {status})")
            budget.take(len(data))
        elif (head_bytes := head_bytes + len(data)) > _MAX_HEAD_BYTES:
            raise _refusal("cannot be fetched: the head of the answer is too long")
    is_sized = any(name in (b"content-length", b"transfer-encoding") for name, _ in response.headers)
    if not response.head_complete or (is_sized and not response.ended):
        raise _refusal("cannot be fetched: the answer ended early")
    return b"".join(response.parts)
