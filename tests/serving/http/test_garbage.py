"""A finished request leaves no reference cycles, whose collection would stop all streams."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from torchweave.config.model_source import resolve
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.request import Output, Response
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.http.app import create_app
from torchweave.serving.http.listener import UvicornServer, listen
from torchweave.serving.ipc import messages

TOKENS = np.arange(30, 32, dtype=np.int32)


class Parrot(EngineClient):
    """Answers every request with two tokens, one streamed and one final."""

    async def start(self) -> None:
        self.model = messages.ModelCard(
            "demo", str(resolve("demo").folder), "D", "f", "cpu", None, 1, 1 << 20, 4096, 104, 1, 16
        )
        self.state = "ready"
        self._changed.set()

    async def stop(self, at_once: bool = False) -> None: ...

    def _send_bytes(self, message: bytes) -> None:
        request = messages.decode_to_engine(message)
        if isinstance(request, messages.Submit):
            ids = np.array([request.id], np.uint64).tobytes()
            last = Response(request.id, Output(TOKENS[1:], "length"), True)
            for at, said in enumerate(
                (
                    messages.Accepted(request.id),
                    messages.Outputs(ids, TOKENS[:1].tobytes(), []),
                    messages.Outputs(b"", b"", [last]),
                )
            ):
                asyncio.get_running_loop().call_later(0.01 * at, self._on_message, said)


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, Any] | None
) -> bytes:
    """The status line of the answer, which is read to its end: the connection is kept."""
    text = b"" if body is None else json.dumps({"model": "demo", **body}).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", answer)
    await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(int(length[1])))
    return answer.partition(b"\r\n")[0]


async def garbage_of(path: str, body: dict[str, Any] | None) -> tuple[set[bytes], Counter[str]]:
    """What three requests were answered with, and the types of what only the collector of cycles finds of them."""
    frontend_context = FrontendContext()
    app = create_app(
        Replicas(EngineConfig(model="demo"), [Parrot(messages.ReplicaInfo(), frontend_context)], frontend_context),
        ServerConfig(),
        wait=True,
    )
    door = listen("127.0.0.1", 0)
    uvicorn = UvicornServer(app)
    serving = asyncio.create_task(uvicorn.serve(sockets=[door]))
    await uvicorn.listening.wait()
    reader, writer = await asyncio.open_connection(*door.getsockname())
    statuses = {await ask(reader, writer, path, body)}  # what is made with the first request stays
    gc.freeze()  # earlier objects are not part of the count
    gc.disable()
    try:
        for _ in range(3):
            statuses.add(await ask(reader, writer, path, body))
        await asyncio.sleep(0.05)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    writer.close()
    uvicorn.should_exit = True
    await serving
    return statuses, found


CHAT = {"messages": [{"role": "user", "content": "12+30="}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "12+30=", "max_tokens": 2, "stream": True}, 200),
        ("/v1/completions", {"prompt": "12+30=", "max_tokens": 2, "n": 2}, 200),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/completions", {"prompt": "12+30=", "max_tokens": -1}, 400),
        ("/health", None, 200),
    ],
)
def test_a_finished_request_leaves_no_reference_cycles(path: str, body: dict[str, Any] | None, status: int) -> None:
    statuses, found = asyncio.run(garbage_of(path, body))
    assert {int(line.split()[1]) for line in statuses} == {status}
    assert found == Counter()
