"""Routes that load and unload low-rank adapters, where `enable_control_routes` allows them; names and fields as vLLM's."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from torchweave.engine.control.errors import ControlError
from torchweave.serving.control import call
from torchweave.serving.errors import ApiError
from torchweave.serving.service import service_of

router = APIRouter(prefix="/v1", tags=["control"])


class LoadRequest(BaseModel):
    """Body of /v1/load_lora_adapter.

    Attributes:
        lora_name: name by which requests choose the adapter as their model.
        lora_path: folder on the server's machine that PEFT has saved.
        load_inplace: replace an adapter of this name: later requests have the new one, earlier ones keep theirs.
    """

    model_config = ConfigDict(extra="forbid")
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    """Body of /v1/unload_lora_adapter; `lora_int_id` is ignored."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str
    lora_int_id: int | None = None


@router.post("/load_lora_adapter", summary="Serve an adapter from a folder of this machine as a model of its own")
async def load_lora_adapter(body: LoadRequest, request: Request) -> PlainTextResponse:
    service = service_of(request)
    if service.is_model_name(body.lora_name):
        raise ApiError(
            400, f"{body.lora_name!r} is the model's own name; give the adapter another one.", param="lora_name"
        )
    rank = service.client.config.max_lora_rank
    known = body.lora_name in service.adapters
    try:
        await call(
            service,
            "load_adapter",
            adapter=body.lora_name,
            path=body.lora_path,
            max_rank=rank,
            replace=body.load_inplace,
        )
    except ControlError:
        if len(service.client.engines) > 1 and not known:  # the others may have it
            with suppress(ControlError):
                await call(service, "unload_adapter", adapter=body.lora_name)
        raise
    return PlainTextResponse(f"The adapter {body.lora_name} is loaded.")


@router.post("/unload_lora_adapter", summary="Serve an adapter no longer; requests that have it end with it")
async def unload_lora_adapter(body: UnloadRequest, request: Request) -> PlainTextResponse:
    service = service_of(request)
    if body.lora_name not in service.adapters:
        raise ApiError(404, f"There is no adapter {body.lora_name!r}; GET /v1/models lists them.", param="lora_name")
    await call(service, "unload_adapter", adapter=body.lora_name)
    return PlainTextResponse(f"The adapter {body.lora_name} is unloaded.")
