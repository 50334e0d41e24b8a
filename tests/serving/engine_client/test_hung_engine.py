"""An engine process that hangs is ended: its requests get an error, and it is started again by option."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from torchweave.config.options import EngineConfig
from torchweave.engine.request import InferenceRequest
from torchweave.serving.engine_client import engine_supervisor
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.engine_client.request_stream import EngineUnavailable
from torchweave.serving.ipc import messages
from torchweave.serving.ipc.socket_stream import Sender, listen, receive
from torchweave.utils.child_process import exit_with_parent

CARD = messages.ModelCard("m", None, "A", "float32", "cpu", None, 1, 100, 8, 97, 10, 16)


def fake_engine(config: EngineConfig, addresses: messages.Addresses, info: messages.ReplicaInfo) -> None:
    """Accepts requests, answers pings, and generates nothing."""
    exit_with_parent()
    listening, sender = listen(addresses.to_engine), Sender(addresses.from_engine(0))
    sender.send(messages.encode(messages.Ready(CARD, "{}")))
    for message in map(messages.decode_to_engine, receive(listening)):
        if isinstance(message, messages.Submit):
            sender.send(messages.encode(messages.Accepted(message.id)))
        elif isinstance(message, messages.Ping):
            sender.send(messages.encode(messages.Pong()))


@pytest.mark.parametrize("restart", [False, True])
def test_a_hung_engine_is_ended(restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_supervisor, "_run_engine", fake_engine)
    monkeypatch.setattr(engine_supervisor, "_PING_SECONDS", 0.1)

    async def scenario() -> None:
        replicas = create_replicas(EngineConfig("demo"), restart=restart, timeout=0.6)
        await replicas.start()
        await replicas.wait_until_ready()
        (engine,) = replicas.engines
        process = engine._process  # type: ignore[attr-defined]
        with replicas.request_stream() as stream:
            stream.submit(InferenceRequest(0, np.array([1])))
            await stream.wait_until_accepted()
            await asyncio.sleep(1)
            assert engine.state == "ready", "an engine without output answers pings"
            os.kill(process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(EngineUnavailable, match=r"has not answered for 0\.6 s"):
                await stream.new_output()
            assert time.monotonic() - begin < 30 and process.wait(30)
        if restart:
            await asyncio.wait_for(replicas.wait_for(lambda: engine.state == "ready"), 30)
            assert engine.restarts == 1 and engine._process.pid != process.pid  # type: ignore[attr-defined]
        else:
            assert engine.state == "failed" and not replicas.alive  # `/health` is 503
        await replicas.stop(at_once=True)

    asyncio.run(scenario())
