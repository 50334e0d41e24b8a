"""Memory of large bodies is free soon after their requests, cycles included."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from torchweave.config.options import ServerConfig
from torchweave.serving.engine_client.admission_pacer import AdmissionPacer
from torchweave.serving.http import middleware
from torchweave.serving.http.middleware import AuthLimitsMiddleware


class Held(list[bytes]):
    """What an error's traceback keeps of a request: its body, and itself."""


def request(size: int) -> tuple[dict[str, Any], Any]:
    message = {"type": "http.request", "body": b"x" * size, "more_body": False}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"host", b"127.0.0.1")],
        "state": {},
    }

    async def receive() -> dict[str, Any]:
        return message

    return scope, receive


@pytest.mark.parametrize(("size", "collected"), [(2 << 20, True), (1000, False)])
def test_cycles_with_a_large_body_are_collected(size: int, collected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_COLLECT_SECONDS", 0.05)
    held: list[weakref.ref[Held]] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        cycle: Any = Held([(await receive())["body"]])
        cycle.append(cycle)
        held.append(weakref.ref(cycle))

    async def send(_message: Any) -> None:
        pass

    async def serve() -> None:
        heavy = AuthLimitsMiddleware(app, ServerConfig(), [], AdmissionPacer())
        for _ in range(2):  # one collection for both, and another later
            await asyncio.gather(*(heavy(*request(size), send) for _ in range(2)))
            await asyncio.sleep(0.15)
            assert all(each() is None for each in held) is collected

    gc.freeze()  # collections look at new objects only: the others of this process take seconds
    gc.disable()
    try:
        asyncio.run(serve())
    finally:
        gc.enable()
        gc.unfreeze()
    assert len(held) == 4
