"""What load balancers and people ask: is it alive, is it ready, what is it?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import torchweave
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.http.routes.dependencies import service_of

router = APIRouter(tags=["status"])


def _status(client: Replicas) -> str:
    """`degraded`: some replicas serve, and some do not."""
    if not client.alive:
        return "failed"
    return "ok" if client.state == "starting" or all(each.state == "ready" for each in client.engines) else "degraded"


@router.get("/health", summary="200 while an engine process is there, else 503; of several replicas it names each")
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


@router.get("/ready", summary="200 once requests are taken; 503 with progress before, and while the server ends")
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
    summary="The engine's record of its last iteration, with TensorRT-LLM's keys, empty before the first; of several replicas "
    "`replicas`, a list of such records",
)
async def statistics(request: Request) -> dict[str, Any]:
    engines = service_of(request).client.engines
    return engines[0].stats if len(engines) == 1 else {"replicas": [engine.stats for engine in engines]}


@router.get("/version", summary="The version of Torchweave")
async def version() -> dict[str, str]:
    return {"version": torchweave.__version__}
