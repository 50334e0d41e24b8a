"""Health, readiness, statistics and version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import torchweave
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.http.routes.dependencies import service_of

router = APIRouter(tags=["status"])


def _status(client: Replicas) -> str:
    """`failed`, `ok`, or `degraded` if only some replicas serve."""
    if not client.alive:
        return "failed"
    return "ok" if client.state == "starting" or all(each.state == "ready" for each in client.engines) else "degraded"


@router.get("/health", summary="200 while an engine process runs, else 503; with several replicas, the state of each")
async def health(request: Request) -> JSONResponse:
    client = service_of(request).client
    body: dict[str, Any] = {"status": _status(client), "engine": client.state}
    if client.failure:
        body["reason"] = client.failure
    if len(client.engines) > 1:
        body["replicas"] = [
            {"replica": engine.replica_info.index, "engine": engine.state, "restarts": engine.restarts}
            | ({"reason": engine.failure} if engine.failure else {})
            for engine in client.engines
        ]
    return JSONResponse(body, 200 if client.alive else 503)


@router.get(
    "/ready", summary="200 once requests are accepted; 503 with progress before, and while the server shuts down"
)
async def ready(request: Request) -> JSONResponse:
    service = service_of(request)
    client = service.client
    body: dict[str, Any] = {"ready": service.ready, "engine": "draining" if service.draining else client.state}
    if client.failure:
        body["reason"] = client.failure
    if not service.ready:
        body["progress"] = client.progress
    return JSONResponse(body, 200 if service.ready else 503)


@router.get(
    "/statistics",
    summary="Statistics of the engine's last iteration with TensorRT-LLM's keys, empty before the first; with several replicas "
    "a list `replicas` of these records",
)
async def statistics(request: Request) -> dict[str, Any]:
    engines = service_of(request).client.engines
    return engines[0].stats if len(engines) == 1 else {"replicas": [engine.stats for engine in engines]}


@router.get("/version", summary="The version of Torchweave")
async def version() -> dict[str, str]:
    return {"version": torchweave.__version__}
