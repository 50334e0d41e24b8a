"""Fake OpenAI server with known latencies, for the tests of the load generator."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """Each answer has its first token after `first` seconds and one more every `gap` seconds.

    `refuse` names requests (by number) that are answered with status 429; `cut` those whose connection ends in the middle.
    """

    first: float = 0.05
    gap: float = 0.02
    refuse: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()
    with_tokenize: bool = True
    locked: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    num_connections: int = 0
    open_now: int = 0
    most_open: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0
                )
                body = await reader.readexactly(length)
                await self.answer(head, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        path = head.split(" ")[1]
        if path.endswith("completions"):
            await self.complete(head, body, writer)
        elif self.locked:
            self.whole(writer, 401, {"error": {"message": "There is no API key"}})
        elif path == "/v1/models":
            self.whole(writer, 200, {"data": [{"id": "fake", "object": "model"}]})
        elif path == "/tokenize" and self.with_tokenize:
            self.whole(writer, 200, {"tokens": list(range(100, 160)), "count": 60})
        else:
            self.whole(writer, 404, {"error": {"message": "no such path"}})

    def whole(self, writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)

    async def complete(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(head)
        if number in self.refuse:
            self.whole(writer, 429, {"error": {"message": "too many requests"}})
            return
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        is_chat = "messages" in body
        count = body.get("max_tokens") or body["max_completion_tokens"]
        begin = asyncio.get_running_loop().time()
        for index in range(count):
            wait = begin + self.first + index * self.gap - asyncio.get_running_loop().time()
            if wait > 0:
                await asyncio.sleep(wait)
            if number in self.cut and index == count // 2:
                writer.transport.abort()
                break
            choice = {"index": 0, "delta": {"content": " a"}} if is_chat else {"index": 0, "text": " a"}
            self.event(writer, {"id": "x", "choices": [choice]})
            await writer.drain()
        else:
            prompt = body.get("prompt") or body["messages"][0]["content"]
            usage = {
                "prompt_tokens": len(prompt) if isinstance(prompt, list) else len(prompt.split()),
                "completion_tokens": count,
            }
            self.event(writer, {"id": "x", "choices": [], "usage": usage | {"total_tokens": sum(usage.values())}})
            self.chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        self.open_now -= 1

    def event(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        self.chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")

    def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """The server on a thread of its own, at a free port."""
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        listener = await asyncio.start_server(server.connected, "127.0.0.1", 0, backlog=2048)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
