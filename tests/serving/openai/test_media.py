"""Images at addresses: what is fetched, and above all what is not."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import pytest

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.validate import check_server
from torchweave.serving import media
from torchweave.serving.errors import ApiError
from torchweave.serving.media import MediaFetcher, is_public

OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:a00:1::", "::10.0.0.1", "2001:db8::1", "no address",
    ],
)  # fmt: skip
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are() -> None:
    assert all(map(is_public, ("8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8")))


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def resolve(
    urls: list[str], *hosts: str, max_bytes: int = 1000, seconds: float = 5.0, max_images: int = 4
) -> list[str]:
    """The URLs of a message's images after fetching."""
    messages = [{"role": "user", "content": [*map(part, urls), {"type": "text", "text": "what"}]}]
    fetched = asyncio.run(MediaFetcher(hosts, max_bytes, seconds).resolve(messages, max_images))
    return [each["image_url"]["url"] for each in fetched[0]["content"][:-1]]


def fetch(answer: bytes | Callable[[bytes], bytes], path: str = "/a.png", count: int = 1, **limits: Any) -> list[bytes]:
    """Fetch images from a server on this machine, which answers so."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(head) if callable(answer) else answer)
        if answer != b"":  # else it keeps the client waiting
            writer.close()
        else:
            await reader.read()
            writer.close()

    async def run() -> list[bytes]:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            given = {"max_bytes": 1000, "seconds": 5.0} | limits
            fetcher = MediaFetcher([f"localhost:{port}"], given["max_bytes"], given["seconds"])
            urls = [f"http://localhost:{port}{path}{number or ''}" for number in range(count)]
            messages = await fetcher.resolve([{"role": "user", "content": list(map(part, urls))}], 4)
            contents = [each["image_url"]["url"].partition(",") for each in messages[0]["content"]]
            return [base64.b64decode(content) for _, _, content in contents]

    return asyncio.run(run())


@pytest.fixture
def local_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the internet: without it nothing on this machine is fetched."""
    monkeypatch.setattr(media, "is_public", lambda _: True)


def test_nothing_private_is_fetched_even_from_an_allowed_host() -> None:
    with pytest.raises(ApiError, match="has a private address"):
        fetch(OK + b"\r\nsecret")
    for host in ("127.0.0.1", "169.254.169.254"):
        with pytest.raises(ApiError, match="has a private address"):
            resolve([f"http://{host}/"], host)


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", (address, 80)) for address in ("93.184.215.14", "10.0.0.1")]

    async def run() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        await media._resolve("a.example", 80)

    with pytest.raises(ApiError, match="has a private address"):
        asyncio.run(run())


@pytest.mark.usefixtures("local_is_public")
def test_images_are_fetched_in_each_form_of_a_body() -> None:
    assert fetch(OK + b"Content-Length: 3\r\n\r\nabc") == [b"abc"]
    assert fetch(OK + b"\r\nabc") == [b"abc"]
    assert fetch(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n") == [b"abc"]

    def echo(head: bytes) -> bytes:
        return OK + b"\r\n" + head.partition(b" HTTP/1.1\r\n")[0]

    assert fetch(echo, "/a b\x7fé?q=%20&") == [b"GET /a%20b%7F%C3%A9?q=%20&"]
    assert fetch(echo, "/a", count=2) == [b"GET /a", b"GET /a1"]


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n", "a redirect, which is not followed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", r"no image \(status 404\)"),
        (OK + b"Content-Length: 9\r\n\r\nabc", "ended early"),
        (OK[:20], "ended early"),
        (b"no HTTP\r\n\r\n", "answered no HTTP"),
        (OK + b"\r\n" + b"x" * 2000, "more bytes than allowed: 1000"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 30000, "the head of the answer is too long"),
    ],
)
def test_other_answers_are_refused_in_a_sentence(answer: bytes, why: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        fetch(answer)
    assert error.value.status == 400 and str(error.value).endswith("; send the image itself, as a data URL.")


@pytest.mark.usefixtures("local_is_public")
def test_the_images_of_a_request_share_the_limits() -> None:
    with pytest.raises(ApiError, match="more bytes than allowed"):
        fetch(OK + b"\r\n" + b"x" * 600, count=2)
    with pytest.raises(ApiError, match=r"longer than 0\.2 seconds \(media_fetch_timeout\)"):
        fetch(b"", seconds=0.2)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://b.example/", r"'b\.example', which this server does not fetch from \(allowed_media_hosts\)"),
        ("http://a.example:8080/", "which this server does not fetch from"),
        ("http://a.example.evil.example/", "which this server does not fetch from"),
        ("http://a.example@evil.example/", "no user name"),
        ("http://a.example:x/", "is invalid"),
        ("http://[::1/", "is invalid"),
        ("http:///a", "is invalid"),
        ("http://ä.example/", "a host in ASCII"),
        ("http://a.example\\@evil.example/", "is invalid"),
    ],
)
def test_other_hosts_are_refused(url: str, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        resolve([url], "a.example", "a.example:81")


def test_nothing_is_fetched_without_the_option() -> None:
    urls = ["http://a.example/", "data:image/png;base64,AAAA", "ftp://a.example/"]
    assert resolve(urls) == urls
    assert resolve(urls[1:], "a.example") == urls[1:]
    assert resolve([*urls[:1], "http://a.example/2"], "a.example", max_images=1)[0] == urls[0]


def test_hosts_of_the_option_are_checked() -> None:
    for wrong in ("http://a.example", "*.example", "a.example:", "a/b"):
        with pytest.raises(ValueError, match="is not a host"):
            check_server(EngineConfig("demo"), ServerConfig(allowed_media_hosts=(wrong,)))
    check_server(EngineConfig("demo"), ServerConfig(allowed_media_hosts=("a.example", "a.example:8080")))
