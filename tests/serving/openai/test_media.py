"""Images at addresses: what is fetched, and above all what is not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.validate import check_server
from torchweave.images import open_image
from torchweave.serving import media
from torchweave.serving.errors import ApiError
from torchweave.serving.media import MediaFetcher, is_public

OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "::ffff:0:7f00:1", "fec0::1", "64:ff9b::a00:1",
        "2002:a00:1::", "2001:0:a00:1::", "::10.0.0.1", "2001:db8::1", "no address",
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


def look_up_as(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], list[str]]) -> None:
    """Names have these addresses."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer()]

    monkeypatch.setattr(media.socket, "getaddrinfo", getaddrinfo)


def test_nothing_private_is_fetched_even_from_an_allowed_host() -> None:
    with pytest.raises(ApiError, match="has a private address"):
        fetch(OK + b"\r\nsecret")
    for host in ("127.0.0.1", "169.254.169.254"):
        with pytest.raises(ApiError, match="has a private address"):
            resolve([f"http://{host}/"], host)


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up_as(monkeypatch, lambda: ["93.184.215.14", "10.0.0.1"])
    with pytest.raises(ApiError, match="has a private address"):
        resolve(["http://a.example/"], "a.example")


@pytest.mark.parametrize(
    "host",
    ["127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"],
)
def test_a_listed_host_of_any_spelling_is_not_fetched_from_if_it_is_private(host: str) -> None:
    with pytest.raises(ApiError, match=r"has a private address|is unknown"):
        resolve([f"http://{host}/"], host.strip("[]"))


@pytest.mark.usefixtures("local_is_public")
def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to the address that was checked, also if the name has another one a moment later."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    look_up_as(monkeypatch, lambda: answers.pop(0))
    assert fetch(OK + b"\r\nabc") == [b"abc"] and answers == [["10.0.0.1"]]


def test_a_slow_lookup_takes_no_thread_of_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own threads, on which grammars are checked, are free while many lookups hang."""
    hanging = threading.Event()

    def wait() -> list[str]:
        hanging.wait(10)
        return []

    look_up_as(monkeypatch, wait)

    async def run() -> float:
        fetcher = MediaFetcher(["a.example"], 1000, 0.5)
        messages = [{"role": "user", "content": [part("http://a.example/")]}]
        fetches = [asyncio.create_task(fetcher.resolve(messages, 1)) for _ in range(100)]
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        await asyncio.to_thread(lambda: None)
        seconds = time.monotonic() - begin
        refusals = await asyncio.gather(*fetches, return_exceptions=True)
        hanging.set()
        assert all("took longer than 0.5 seconds" in str(each) for each in refusals)
        return seconds

    assert asyncio.run(run()) < 5, "look-ups, which wait for 10 seconds, hold the threads of others"


@pytest.mark.parametrize("url", ["http://a.example/" + "\u00e9" * 4_000_000, "http://" + "\ufdfa" * 2_600_000])
def test_a_long_url_does_not_stop_the_event_loop(url: str) -> None:
    begin = time.thread_time()  # of this thread alone: others may still end what tests before have left
    with pytest.raises(ApiError, match="characters, but at most 8192 are allowed"):
        resolve([url], "a.example")
    assert time.thread_time() - begin < 0.5


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
def test_what_is_no_image_is_refused_by_the_decoder() -> None:
    """Compressed content is not decompressed, and a content type is not believed."""
    bomb = gzip.compress(bytes(10_000_000))
    for head, body in (
        (b"Content-Encoding: gzip\r\n", bomb), (b"", b"<html></html>"), (b"Content-Type: text/html\r\n", b"<svg/>"),
    ):  # fmt: skip
        [content] = fetch(OK + head + b"\r\n" + body, max_bytes=100_000)
        assert content == body
        with pytest.raises(ValueError, match="cannot be decoded"):
            open_image(content)


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize(
    ("begin", "drip", "pause", "why"),
    [
        (b"HTTP/1.1 200 OK\r\na: ", b"a", 0.02, "took longer than 0.5 seconds"),
        (OK + b"\r\n", b"a", 0.02, "took longer than 0.5 seconds"),
        (OK + b"Content-Length: 9999999999999\r\n\r\n", b"a" * 65536, 0.0, "more bytes than allowed"),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n",
            b"1;" + b"x" * 1000 + b"\r\na\r\n",
            0.0,
            "more bytes than allowed",
        ),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000, 0.0, "head of the answer is too long|answered no HTTP"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.0, r"no image \(status 100\)"),
    ],
)
def test_an_answer_without_end_stops_no_other_client(begin: bytes, drip: bytes, pause: float, why: str) -> None:
    """It is refused in bounded time, and the event loop goes on meanwhile."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            writer.write(begin)
            while True:
                writer.write(drip)
                await writer.drain()
                await asyncio.sleep(pause)

    async def longest_pause() -> float:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            fetcher = MediaFetcher([f"localhost:{port}"], 1_000_000, 0.5)
            messages = [{"role": "user", "content": [part(f"http://localhost:{port}/")]}]
            asking = asyncio.create_task(fetcher.resolve(messages, 4))
            longest, last, begin = 0.0, time.monotonic(), time.monotonic()
            while not asking.done():
                await asyncio.sleep(0.005)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            assert last - begin < 60
            with pytest.raises(ApiError, match=why):
                await asking
            return longest

    assert asyncio.run(longest_pause()) < 5, "the answer has no end, and would hold the loop as long"


@pytest.mark.usefixtures("local_is_public")
def test_many_requests_share_a_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_MAX_FETCHES", 3)
    now = most = 0

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        writer.write(OK + b"\r\nabc")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            fetcher = MediaFetcher([f"localhost:{port}"], 1000, 5.0)
            urls = [part(f"http://localhost:{port}/{number}") for number in range(4)]
            await asyncio.gather(*(fetcher.resolve([{"role": "user", "content": urls}], 4) for _ in range(3)))

    asyncio.run(run())
    assert most == 3


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
        ("http://user:secret@a.example/", "no user name"),
        ("http://@a.example/", "no user name"),
        ("http://a.example./", "which this server does not fetch from"),
        ("http://a.example:0/", "which this server does not fetch from"),
        ("http://2130706433/", "which this server does not fetch from"),
        ("http://[::ffff:127.0.0.1]/", "which this server does not fetch from"),
        ("http://a.example%2eevil/", "is invalid"),
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


def test_files_of_one_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"image")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")

    def read(url: str, max_bytes: int = 100, where: str | None = str(folder)) -> str:
        messages = [{"role": "user", "content": [part(url)]}]
        found = asyncio.run(MediaFetcher((), max_bytes, 5.0, where).resolve(messages, 4))
        return found[0]["content"][0]["image_url"]["url"]

    content = "data:image/*;base64," + base64.b64encode(b"image").decode()
    assert read(f"file://{folder}/a%20b.png") == read(f"FILE://localhost{folder}/a b.png") == content
    for url in (
        f"file://{tmp_path}/secret.png", f"file://{folder}/../secret.png", f"file://{folder}/%2e%2e/secret.png",
        f"file://{folder}/link.png", f"file://{folder}/none.png", f"file://{folder}", "file:///dev/zero",
        f"file://host{folder}/a%20b.png", f"file://{folder}/\0.png",
    ):  # fmt: skip
        with pytest.raises(ApiError, match="names no file that this server reads"):
            read(url)
    with pytest.raises(ApiError, match="more bytes than allowed"):
        read(f"file://{folder}/a%20b.png", max_bytes=4)
    url = f"file://{folder}/a%20b.png"
    assert read(url, where=None) == url  # which the processor refuses
    with pytest.raises(ValueError, match="is no folder"):
        MediaFetcher((), 1, 1.0, str(tmp_path / "none"))
