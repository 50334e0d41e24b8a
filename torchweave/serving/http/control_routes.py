"""Routes that control the engines, where `enable_control_routes` allows them; names and fields as vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from torchweave.serving.control import call
from torchweave.serving.service import service_of

router = APIRouter(tags=["control"])


class ProfileRequest(BaseModel):
    """Body of /start_profile.

    Attributes:
        num_steps: steps until the profile ends by itself; None: it ends with /stop_profile.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    num_steps: Annotated[int | None, Field(alias="max_iterations")] = None


@router.post("/reset_prefix_cache", summary="Forget the KV cache of earlier requests; no success while requests run")
async def reset_prefix_cache(
    request: Request, reset_running_requests: Annotated[bool, Query()] = False
) -> dict[str, bool]:
    results = await call(service_of(request), "reset_prefix_cache", reset_running_requests=reset_running_requests)
    return {"success": all(results)}


@router.post(
    "/pause", summary="Start no new request until /resume; the running ones end, are cancelled, or stay as they are"
)
async def pause(
    request: Request,
    mode: Annotated[Literal["wait", "abort", "keep"], Query()] = "abort",
    clear_cache: Annotated[bool, Query()] = True,
) -> dict[str, str]:
    await call(service_of(request), "pause", mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume", summary="Continue after /pause")
async def resume(request: Request) -> dict[str, str]:
    await call(service_of(request), "resume")
    return {"status": "resumed"}


@router.get("/is_paused", summary="Whether new requests wait")
async def is_paused(request: Request) -> dict[str, bool]:
    return {"is_paused": any(await call(service_of(request), "is_paused"))}


@router.post("/start_profile", summary="Record what the engines run, a trace for each rank in the folder `profile_dir`")
async def start_profile(request: Request, body: ProfileRequest | None = None) -> dict[str, str]:
    service = service_of(request)
    folder = service.client.config.profile_dir
    await call(service, "start_profile", folder=folder, num_steps=None if body is None else body.num_steps)
    return {"status": "profiling"}


@router.post("/stop_profile", summary="End the profile and write its traces")
async def stop_profile(request: Request) -> dict[str, Any]:
    files = await call(service_of(request), "stop_profile")
    return {"status": "stopped", "files": [file for of_engine in files for file in of_engine]}
