"""An application over an engine client that is only looked at: what it said is given, no engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.engine_client.request_metrics import RequestMetrics
from torchweave.serving.http.app import create_app


class Clock:
    """A clock that only the test advances."""

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
    replicas, clock = create_replicas(EngineConfig(model="demo"), count), Clock()
    for client in replicas.engines:
        client.request_metrics = RequestMetrics(clock)
    return create_app(replicas, ServerConfig()), replicas.engines, clock


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


STATS = {
    "Max KV cache blocks": 100, "Used KV cache blocks": 25, "numRunningRequests": 3, "numQueuedRequests": 7,
    "kvCacheStats": {"tokensPerBlock": 16, "reusedBlocks": 30, "missedBlocks": 10},
    "inflightBatchingStats": {"numPausedRequests": 2},
}  # fmt: skip


def record_some_requests(request_metrics: RequestMetrics, clock: Clock) -> None:
    """Five answers: one streamed to its length, one whole, one cancelled while it waited, one refused, one still open."""
    request_metrics.submitted(0, num_prompt=10, streaming=True)
    request_metrics.submitted(1, num_prompt=20, streaming=False)
    request_metrics.submitted(2, num_prompt=30, streaming=True)
    request_metrics.submitted(3, num_prompt=40, streaming=True)
    request_metrics.submitted(4, num_prompt=50, streaming=True)
    request_metrics.refused(3)
    clock.now += 0.03
    request_metrics.state_changed([(0, "started"), (1, "started")])
    for seconds, tokens in ((0.02, 1), (0.02, 1), (0.02, 2)):
        clock.now += seconds
        request_metrics.response_received(0, tokens, None)
    request_metrics.state_changed([(1, "answering")])
    clock.now += 0.01
    request_metrics.response_received(0, 1, "length")
    request_metrics.response_received(1, 8, "stop")
    request_metrics.response_received(2, 0, "cancelled")
    request_metrics.state_changed([(4, "started"), (4, "paused")])
    request_metrics.iterations_finished([(0.004, 60, 2), (0.002, 0, 2), (0.003, 0, 2)])
