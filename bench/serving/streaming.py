"""Cost of a streamed token in the HTTP process: the server over a fake engine, with clients that only read.

    python bench/serving/streaming.py [--streams 128] [--tokens 200] [--json bench/results/streaming_h100_202611.json]

Each step yields a token per stream; the next starts when all are sent. Times are CPU microseconds per token of the process,
split into user time (Python and the event loop) and system time (sending).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.request import Output, Response
from torchweave.serving.engine_client.client import EngineClient, FrontendContext
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.http.app import create_app
from torchweave.serving.ipc import messages
from torchweave.utils import gc

ROOT = Path(__file__).parents[2]
TOKENS = np.arange(20, 100, dtype=np.int32)  # ids of the demo model with printable text
CLIENT = """
import selectors, socket, sys
port, streams, request = int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer.read()
waiting, events = selectors.DefaultSelector(), 0
for _ in range(streams):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(request)
    waiting.register(connection, selectors.EVENT_READ, bytearray())
while streams:
    for key, _ in waiting.select():
        data = key.fileobj.recv(1 << 16)
        events += data.count(b"data: ")
        key.data[:] = key.data[-16:] + data
        if not data or b"[DONE]" in key.data:
            waiting.unregister(key.fileobj)
            streams -= 1
print(events)
"""


class Speaker(EngineClient):
    """An engine client with a fake engine that accepts every request and emits given tokens."""

    async def start(self) -> None:
        folder = str(ROOT / "torchweave/models/demo")
        self.model = messages.ModelCard("demo", folder, "Demo", "float32", "cpu", None, 1, 1 << 20, 4096, 104, 1, 16)
        self.state, self.ids = "ready", list[int]()
        self._changed.set()

    async def stop(self, at_once: bool = False) -> None: ...

    def _send_bytes(self, message: bytes) -> None:
        request = messages.decode_to_engine(message)
        self.ids.append(request.id)
        asyncio.get_running_loop().call_soon(self._on_message, messages.Accepted(request.id))

    def say(self, tokens: np.ndarray) -> None:
        """Send a token for each request through the message encoding."""
        ids = np.array(self.ids, np.uint64).tobytes()
        self._on_message(messages.decode_from_engine(messages.encode(messages.Outputs(ids, tokens.tobytes(), []))))

    def end(self) -> None:
        last = [Response(each, Output(TOKENS[:1], "length"), True) for each in self.ids]
        self._on_message(messages.Outputs(b"", b"", last))


async def measure(streams: int, tokens: int) -> dict[str, Any]:
    frontend_context = FrontendContext()
    speaker = Speaker(messages.ReplicaInfo(), frontend_context)
    speaker.state = "starting"
    engines = Replicas(EngineConfig(model="demo"), [speaker], frontend_context)
    app = create_app(engines, ServerConfig(served_model_name=("m",), max_waiting_requests=streams), wait=True)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http="httptools", ws="none", log_level="warning", access_log=False)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with gc.gc_frozen():
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(port), str(streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert client.stdin is not None
        client.stdin.write(request(tokens))
        client.stdin.close()
        while len(speaker.ids) < streams:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        draw = np.random.default_rng(0)
        before, begin = os.times(), time.perf_counter()
        for _ in range(tokens - 1):
            speaker.say(draw.choice(TOKENS, streams))
            for _ in range(4):  # let the tasks wake up and write
                await asyncio.sleep(0)
        after, wall = os.times(), time.perf_counter() - begin
        speaker.end()
        assert client.stdout is not None
        events = int(await asyncio.to_thread(client.stdout.read))
    server.should_exit = True
    await serving
    count = streams * (tokens - 1)
    assert events >= streams * tokens, f"{events} events for {streams} streams of {tokens} tokens: some went together"
    per_token = {"user": after.user - before.user, "system": after.system - before.system, "wall": wall}
    return {"streams": streams, **{f"{name}_us": round(each / count * 1e6, 2) for name, each in per_token.items()}}


def request(tokens: int) -> bytes:
    body = json.dumps({"model": "m", "prompt": [21] * 300, "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    arguments = parser.parse_args()
    results = []
    for streams in arguments.streams:
        loop = uvicorn.Config("x").get_loop_factory()
        with asyncio.Runner(loop_factory=loop) as runner:
            results.append(runner.run(measure(streams, arguments.tokens)))
        print(results[-1], flush=True)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
        facts = {"command": " ".join(sys.argv), "commit": commit.stdout.strip(), "results": results}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
