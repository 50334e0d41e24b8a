"""An application over an engine client that is only looked at: what it said is given, no engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.engine_client.engine_supervisor import own_engines
from torchweave.serving.engine_client.request_metrics import Traffic
from torchweave.serving.http.app import create_app


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watched(**facts: Any) -> tuple[FastAPI, EngineClient, Clock]:
    """An application, its client with `facts` as attributes, and the clock of its traffic."""
    app, (client,), clock = watched_replicas(1)
    for name, value in facts.items():
        setattr(client, name, value)
    return app, client, clock


def watched_replicas(count: int) -> tuple[FastAPI, tuple[EngineClient, ...], Clock]:
    """The same with several clients, none of which is started."""
    replicas, clock = own_engines(EngineConfig(model="demo"), count), Clock()
    for client in replicas.engines:
        client.traffic = Traffic(clock)
    return create_app(replicas, ServerConfig()), replicas.engines, clock


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


STATS = {
    "Max KV cache blocks": 100, "Used KV cache blocks": 25, "numRunningRequests": 3, "numQueuedRequests": 7,
    "kvCacheStats": {"tokensPerBlock": 16, "reusedBlocks": 30, "missedBlocks": 10},
    "inflightBatchingStats": {"numPausedRequests": 2},
}  # fmt: skip


def some_traffic(traffic: Traffic, clock: Clock) -> None:
    """Five answers: one streamed to its length, one whole, one cancelled while it waited, one refused, one still open."""
    traffic.submitted(0, num_prompt=10, streaming=True)
    traffic.submitted(1, num_prompt=20, streaming=False)
    traffic.submitted(2, num_prompt=30, streaming=True)
    traffic.submitted(3, num_prompt=40, streaming=True)
    traffic.submitted(4, num_prompt=50, streaming=True)
    traffic.refused(3)
    clock.now += 0.03
    traffic.moved([(0, "started"), (1, "started")])
    for seconds, tokens in ((0.02, 1), (0.02, 1), (0.02, 2)):
        clock.now += seconds
        traffic.answered(0, tokens, None)
    traffic.moved([(1, "answering")])
    clock.now += 0.01
    traffic.answered(0, 1, "length")
    traffic.answered(1, 8, "stop")
    traffic.answered(2, 0, "cancelled")
    traffic.moved([(4, "started"), (4, "paused")])
    traffic.iterated([(0.004, 60, 2), (0.002, 0, 2), (0.003, 0, 2)])
