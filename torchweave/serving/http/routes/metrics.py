"""`/metrics` for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

router = APIRouter(tags=["status"])


@router.get(
    "/metrics",
    summary="Counters, gauges and histograms in Prometheus' text format",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    await request.app.state.poll_metrics()
    text, content_type = request.app.state.metrics.exposition(request.headers.get("accept", ""))
    return Response(text, media_type=content_type)
