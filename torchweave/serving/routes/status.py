"""What load balancers and people ask: is it alive, is it ready, what is it?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import torchweave
from torchweave.serving.routes.shared import service_of

router = APIRouter(tags=["status"])


@router.get("/health", summary="200 while the engine process is there, else 503")
async def health(request: Request) -> JSONResponse:
    client = service_of(request).client
    body: dict[str, Any] = {"status": "ok" if client.alive else "failed", "engine": client.state}
    if client.failure:
        body["reason"] = client.failure
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
    "/statistics", summary="The engine's record of its last iteration, with TensorRT-LLM's keys; empty before the first"
)
async def statistics(request: Request) -> dict[str, Any]:
    return service_of(request).client.stats


@router.get("/version", summary="The version of Torchweave")
async def version() -> dict[str, str]:
    return {"version": torchweave.__version__}
