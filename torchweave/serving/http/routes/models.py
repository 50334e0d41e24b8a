"""`/v1/models`: the served model under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torchweave.serving.http.routes.dependencies import service_of
from torchweave.serving.service import Service

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", summary="List the names of the served model")
async def models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    return {"object": "list", "data": [_entry(service, name) for name in service.names]}


@router.get("/{name:path}", summary="Describe the model of a name")
async def model(name: str, request: Request) -> dict[str, Any]:
    if not name:  # `/v1/models/`
        return await models(request)
    service = service_of(request)
    return _entry(service, service.check_model(name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    model = service.model
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "torchweave",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
