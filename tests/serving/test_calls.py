"""How many Python functions of the package an HTTP process calls for a streamed chat; an engine's messages are replayed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import torchweave
from tests.serving.conftest import TEMPLATE
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.request import Output, Response, Responses, SamplingParams
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.http.app import create_app
from torchweave.serving.ipc import messages
from torchweave.serving.ipc.socket_stream import _SIZE, Reader
from torchweave.serving.tokenization import AsyncTokenizer

PACKAGE = Path(torchweave.__file__).parent
NUM_TOKENS = 8
CALLS_OF_A_TOKEN, CALLS_OF_ALL = 30, 600


class CallCounter:
    """A profile hook that counts calls by function; a coroutine counts each time that it goes on."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.calls[frame.f_code.co_qualname] += 1


class ReplayedEngine:
    """One HTTP process with the built-in model's tokenizer; the engine's answers come from the test.

    Attributes:
        to_engine: what the engine was sent.
    """

    def __init__(self) -> None:
        self.replicas = create_replicas(EngineConfig(model="demo"), 1)
        (self.client,) = self.replicas.engines
        self.app = create_app(self.replicas, ServerConfig())
        self.to_engine: list[Any] = []
        self.client._to_engine = self  # type: ignore[assignment]
        self.client.state, self.replicas._opened = "ready", True
        sizes = {"num_parameters": 1, "max_model_len": 512, "max_batch_size": 8, "vocab_size": 512}
        names = {"folder": str(PACKAGE / "models" / "demo"), "architecture": "A", "dtype": "float32", "device": "cpu"}
        self.client.model = messages.ModelCard(
            "demo", **names, **sizes, quantization=None, num_kv_blocks=64, block_size=16
        )

    async def start(self) -> None:
        service = self.app.state.service
        service.tokenizer = await AsyncTokenizer.open(str(PACKAGE / "models" / "demo"), TEMPLATE)
        service.startup_ok = True
        self._reader = Reader(lambda message: self.client._on_message(messages.decode_from_engine(message)))

    def send(self, message: bytes) -> None:
        """Called by the engine client."""
        self.to_engine.append(messages.decode_to_engine(message))

    def encoded(self, *items: Any) -> list[bytes]:
        """Messages of the engine as they come from its socket."""
        sent = [message for item in items for _, message in messages.messages(item, self.client.replica_info)]
        return [_SIZE.pack(len(message)) + message for message in sent]

    async def receive(self, parts: list[bytes]) -> None:
        """Let the process read messages, and do what follows from them."""
        for part in parts:
            self._reader.data_received(part)
        for _ in range(10):
            await asyncio.sleep(0)


async def chat(engine: ReplayedEngine, counter: CallCounter) -> tuple[list[Counter[str]], bytes]:
    """Stream a chat of `NUM_TOKENS` tokens; returns the calls for each token, and the bodies."""
    question = {"messages": [{"role": "user", "content": "12+30="}], "stream": True, "temperature": 0}
    body = json.dumps(question | {"model": "demo", "max_tokens": NUM_TOKENS}).encode()
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
        "query_string": b"", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    responses: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: Any) -> None:
        responses.append(message)

    engine.to_engine.clear()
    sys.setprofile(counter)
    try:
        task = asyncio.create_task(engine.app(scope, receive, send))
        while not engine.to_engine:
            await asyncio.sleep(0.001)
        sys.setprofile(None)
        request_id = engine.to_engine[0].id
        begun = engine.encoded(messages.Accepted(request_id), messages.RequestStateChanges([(request_id, "started")]))
        ids, last = np.array([request_id], np.uint64), Output(np.array([77], np.int32), "length")
        steps = [engine.encoded(Responses((), ids, np.array([70 + n], np.int32))) for n in range(NUM_TOKENS - 1)]
        steps.append(engine.encoded([Response(request_id, last, True)]))
        sys.setprofile(counter)
        await engine.receive(begun)
        calls = []
        for step in steps:
            before = counter.calls.copy()
            await engine.receive(step)
            calls.append(counter.calls - before)
        await task
    finally:
        sys.setprofile(None)
    return calls, b"".join(message.get("body", b"") for message in responses)


def test_a_streamed_chat_calls_few_functions() -> None:
    async def ask() -> tuple[Counter[str], list[Counter[str]], bytes]:
        engine = ReplayedEngine()
        await engine.start()
        await chat(engine, CallCounter())  # what is computed once
        counter = CallCounter()
        calls, body = await chat(engine, counter)
        return counter.calls, calls, body

    of_all, of_tokens, body = asyncio.run(ask())
    assert body.count(b'"content":"') == 1 + NUM_TOKENS and body.endswith(b"data: [DONE]\n\n"), body
    of_a_token = of_tokens[NUM_TOKENS // 2]
    assert of_a_token.total() <= CALLS_OF_A_TOKEN, of_a_token.most_common()
    assert of_all.total() <= CALLS_OF_ALL, of_all.most_common(80)
    assert of_all["Service.model"] == 1


def test_parameters_are_validated_once_and_arrive_whole(monkeypatch: Any) -> None:
    validated: list[SamplingParams] = []
    check = SamplingParams.__post_init__

    def counting(params: SamplingParams) -> None:
        validated.append(params)
        check(params)

    async def ask() -> Any:
        engine = ReplayedEngine()
        await engine.start()
        with monkeypatch.context() as patch:
            patch.setattr(SamplingParams, "__post_init__", counting)
            await chat(engine, CallCounter())
            return messages.decode_request(engine.to_engine[0]).sampling

    sampling = asyncio.run(ask())
    assert len(validated) == 1 and sampling == validated[0] and sampling == SamplingParams(temperature=0, max_tokens=8)
