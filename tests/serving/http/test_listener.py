"""Exclusive listening address, and HTTP/1.1 connections regardless of upgrade offers."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from threading import Barrier
from typing import Any

import pytest

from tests.serving.running import free_port
from torchweave.serving.http import listener as listening
from torchweave.serving.http.listener import UvicornServer, join, listen

# -- the address -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_one_of_several_concurrent_servers_gets_the_address(shared: bool) -> None:
    servers = 4
    together = Barrier(servers)

    def start(port: int) -> socket.socket | None:
        together.wait()
        try:
            return listen("127.0.0.1", port, shared)
        except ValueError as refused:
            assert "cannot listen on" in str(refused) and "Address already in use" in str(refused)
            return None

    with ThreadPoolExecutor(servers) as pool:
        for _ in range(50):
            found = [one for one in pool.map(start, [free_port()] * servers) if one is not None]
            assert len(found) == 1
            found[0].close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")])
def test_wildcard_address_conflicts_with_specific_ones(host: str, other: str, shared: bool) -> None:
    with listen(host, 0, shared) as first:
        port = first.getsockname()[1]
        for also in (False, True):
            with pytest.raises(ValueError, match="cannot listen on"):
                listen(other, port, also)
        if not shared:
            with pytest.raises(OSError, match="in use"):
                join(host, port)


@pytest.fixture(params=["Linux", "gVisor"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a socket can be shared that was bound alone, and where it cannot."""
    if request.param == "gVisor":
        tries = iter([True])

        def refused_once(host: str, port: int) -> socket.socket:
            if next(tries, False):
                raise OSError("in use")
            return join(host, port)

        monkeypatch.setattr(listening, "join", refused_once)


@pytest.mark.usefixtures("system")
def test_joining_process_gets_connections_once_it_listens() -> None:
    with listen("127.0.0.1", 0, shared=True) as first, join(*first.getsockname()) as further, ExitStack() as things:

        def given(to: socket.socket) -> int:
            to.setblocking(False)
            for count in range(100):
                try:
                    things.enter_context(to.accept()[0])
                except BlockingIOError:
                    return count
            return 100

        def connect() -> None:
            for _ in range(40):
                things.enter_context(socket.create_connection(first.getsockname()))

        connect()
        assert given(first) == 40
        further.listen()
        connect()
        found = given(first), given(further)
        assert min(found) > 0 and sum(found) == 40


# -- offers of other protocols -----------------------------------------------------------------------------------------

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
BODY = b"Content-Length: 8\r\n\r\nabcdefgh"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\ndefgh\r\n0\r\n\r\n"
LAST = b"POST /last HTTP/1.1\r\nConnection: close\r\n" + BODY


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the body."""
    if scope["type"] != "http":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    body, more = b"", True
    while more:
        part = await receive()
        body, more = body + part["body"], part["more_body"]
    said = b"<%s %s %s>" % (scope["method"].encode(), scope["path"].encode(), body)
    headers = [] if scope["path"] == "/stream" else [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said[:5], "more_body": True})
    await send({"type": "http.response.body", "body": said[5:]})


def answers(sent: bytes, size: int) -> bytes:
    """Everything that a server sends on one connection until it closes it; data is sent in chunks of a given size."""

    async def ask() -> bytes:
        uvicorn = UvicornServer(echo)
        with listen("127.0.0.1", 0) as door:
            serving = asyncio.create_task(uvicorn.serve(sockets=[door]))
            await uvicorn.listening.wait()
            reader, writer = await asyncio.open_connection(*door.getsockname())
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rest = iter(sent)
            while part := bytes(islice(rest, size)):
                writer.write(part)
                await asyncio.sleep(0.001)
            found = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            uvicorn.should_exit = True
            await serving
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [1, 100, 10_000])
@pytest.mark.parametrize("body", [BODY, CHUNKS])
def test_an_upgrade_offer_is_ignored(body: bytes, size: int, capfd: pytest.CaptureFixture[str]) -> None:
    offers = [b"POST /%d HTTP/1.1\r\nHost: x\r\n" % number + OFFER + body for number in range(2)]
    plain = b"POST /plain HTTP/1.1\r\nHost: x\r\n" + body
    socket_offer = b"GET /socket HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    found = answers(offers[0] + plain + socket_offer + offers[1] + LAST, size)
    assert found.count(b"HTTP/1.1 200 OK\r\n") == 5
    said = [b"POST /0 abcdefgh", b"POST /plain abcdefgh", b"GET /socket ", b"POST /1 abcdefgh", b"POST /last abcdefgh"]
    assert re.findall(b"<([^>]*)>", found) == said
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("last", [b"1.1\r\nConnection: close, Upgrade\r\n", b"1.0\r\nConnection: Upgrade\r\n"])
def test_an_offer_on_a_connection_that_is_to_be_closed(last: bytes) -> None:
    found = answers(b"POST /once HTTP/" + last + b"Upgrade: h2c\r\n" + BODY + LAST, 10_000)
    assert found.endswith(b"<POST /once abcdefgh>") and found.count(b"HTTP/1.1 ") == 1
    assert b"connection: close\r\n" in found


def test_malformed_data_after_an_upgrade_offer_is_rejected() -> None:
    found = answers(b"POST /0 HTTP/1.1\r\n" + OFFER + BODY + b"no request\r\n\r\n", 10_000)
    assert b"HTTP/1.1 400 " in found
    assert b"HTTP/1.1 400 " in answers(b"CONNECT no-port HTTP/1.1\r\nConnection: close\r\n\r\n", 10_000)


def test_thousands_of_offers_at_once_are_answered() -> None:
    found = answers((b"GET / HTTP/1.1\r\n" + OFFER + b"\r\n") * 3000 + LAST, 1 << 20)
    assert found.count(b"<GET / >") == 3000 and found.endswith(b"<POST /last abcdefgh>")


# -- HTTP/1.0 ----------------------------------------------------------------------------------------------------------


def test_an_answer_of_http_1_0_has_no_chunks() -> None:
    for path, length in ((b"stream", b""), (b"whole", b"content-length: 22\r\n")):
        for kept in (b"", b"Connection: keep-alive\r\n"):
            head, _, body = answers(b"POST /%s HTTP/1.0\r\n" % path + kept + BODY, 10_000).partition(b"\r\n\r\n")
            assert body == b"<POST /%s abcdefgh>" % path
            assert b"chunked" not in head and length in head + b"\r\n" and b"connection: close" in head
    assert b"transfer-encoding: chunked" in answers(b"GET /stream HTTP/1.1\r\n\r\n" + LAST, 10_000)
    assert b"chunked" not in answers(b"POST /stream HTTP/1.0\r\n" + OFFER + BODY, 10_000)


# -- heads without end -------------------------------------------------------------------------------------------------


def headers(count: int) -> bytes:
    """Of 100 bytes each."""
    return b"".join(b"X-%04d: %s\r\n" % (number, b"a" * 90) for number in range(count))


@pytest.mark.parametrize(
    "without_end",
    [b"GET /" + b"a" * 69_000, b"GET / HTTP/1.1\r\nX: " + b"a" * 69_000, b"GET / HTTP/1.1\r\n" + headers(690)],
    ids=["address", "header", "headers"],
)
def test_endless_request_head_is_disconnected(without_end: bytes) -> None:
    found = answers(without_end, 10_000)
    assert found.startswith(b"HTTP/1.1 400 ") and found.endswith(b"The head of the request is longer than 65536 bytes.")


def test_data_after_a_body_is_bounded() -> None:
    begin = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    assert b"HTTP/1.1 400 " in answers(begin + headers(790), 10_000)


def test_long_bodies_and_pipelined_requests_do_not_count_as_heads() -> None:
    long = b"POST /long HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + b"a" * 300_000
    found = answers(long + (b"GET / HTTP/1.1\r\n" + headers(300) + b"\r\n") * 20 + LAST, 50_000)
    assert found.count(b"<GET / >") == 20 and found.endswith(b"<POST /last abcdefgh>")


# -- connections without requests --------------------------------------------------------------------------------------


def connections(act: Callable[[UvicornServer, tuple[str, int]], Awaitable[None]], **options: Any) -> None:
    """Run `act` with a server and its address."""

    async def run() -> None:
        uvicorn = UvicornServer(echo, **options)
        with listen("127.0.0.1", 0) as door:
            serving = asyncio.create_task(uvicorn.serve(sockets=[door]))
            await uvicorn.listening.wait()
            await act(uvicorn, door.getsockname())
            uvicorn.should_exit = True
            await serving

    asyncio.run(run())


async def request(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(LAST)
    found = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return found


def test_connections_that_send_no_head_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_HEAD_SECONDS", 0.2)

    async def act(uvicorn: UvicornServer, address: tuple[str, int]) -> None:
        silent, slow, idle = [await asyncio.open_connection(*address) for _ in range(3)]
        slow[1].write(b"GET / HTTP/1.1\r\nHost:")
        idle[1].write(b"GET /first HTTP/1.1\r\n\r\n")
        assert await asyncio.wait_for(silent[0].read(), 5) == b""
        assert b"did not arrive within 0.2 seconds" in await asyncio.wait_for(slow[0].read(), 5)
        idle[1].write(LAST)  # between requests the keep-alive time holds
        assert (await asyncio.wait_for(idle[0].read(), 5)).count(b"200 OK") == 2
        for _, writer in (silent, slow, idle):
            writer.close()

    connections(act)


def test_half_open_connections_leave_room_for_others() -> None:
    async def act(uvicorn: UvicornServer, address: tuple[str, int]) -> None:
        uvicorn.server_state._limit = 8  # type: ignore[attr-defined]
        half_open = []
        for sent in (b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc") * 10:
            half_open.append(await asyncio.open_connection(*address))
            half_open[-1][1].write(sent)
            await asyncio.sleep(0.002)
            assert len(uvicorn.server_state.connections) <= 9
        assert b"<POST /last abcdefgh>" in await request(address)
        for _, writer in half_open:
            writer.close()

    connections(act)


def test_connections_of_an_address_are_limited_by_option() -> None:
    async def act(uvicorn: UvicornServer, address: tuple[str, int]) -> None:
        first = [await asyncio.open_connection(*address) for _ in range(3)]
        with pytest.raises((OSError, AssertionError)):
            assert b"200 OK" in await request(address)
        first[0][1].close()
        await asyncio.sleep(0.05)
        assert b"200 OK" in await request(address)
        for _, writer in first:
            writer.close()

    connections(act, max_connections_per_address=3)
