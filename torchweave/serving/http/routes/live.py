"""The live page at `/` and its data at `/live`."""

from __future__ import annotations

import functools
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

router = APIRouter(tags=["status"])

# The page is self-contained and must not load anything from other origins.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


@functools.cache
def page() -> str:
    """Text of the page."""
    return files("torchweave.serving.http").joinpath("page.html").read_text(encoding="utf-8")


@router.get("/", response_class=HTMLResponse, summary="The live page")
async def root() -> HTMLResponse:
    return HTMLResponse(page(), headers={"Content-Security-Policy": _POLICY})


@router.get(
    "/live",
    summary="The data of the live page",
    response_class=Response,
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def live(request: Request) -> Response:
    text = await request.app.state.live.text()
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})
