"""One server has an address."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import pytest

from tests.serving.running import free_port
from torchweave.serving import listening
from torchweave.serving.listening import join, listen


@pytest.mark.parametrize("shared", [False, True])
def test_of_servers_that_start_at_once_one_has_the_address(shared: bool) -> None:
    servers = 4
    together = Barrier(servers)

    def start(port: int) -> socket.socket | None:
        together.wait()
        try:
            return listen("127.0.0.1", port, shared)
        except ValueError as refused:
            assert "cannot be listened on: Address already in use" in str(refused)
            return None

    with ThreadPoolExecutor(servers) as pool:
        for _ in range(50):
            found = [one for one in pool.map(start, [free_port()] * servers) if one is not None]
            assert len(found) == 1
            found[0].close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")])
def test_an_address_is_had_with_all_that_it_is_part_of(host: str, other: str, shared: bool) -> None:
    with listen(host, 0, shared) as first:
        port = first.getsockname()[1]
        for also in (False, True):
            with pytest.raises(ValueError, match="cannot be listened on"):
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
def test_who_joins_is_given_connections_once_he_listens() -> None:
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
