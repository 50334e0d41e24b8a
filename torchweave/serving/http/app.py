"""The HTTP application: routes over a `Service`. Further routers are added to what `create_app` returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

import torchweave
from torchweave.config.options import ServerConfig
from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.errors import add_error_handlers
from torchweave.serving.http.fast_path import FastPathMiddleware
from torchweave.serving.http.middleware import (
    AuthLimitsMiddleware,
    HeadMethodMiddleware,
    RequestIdMiddleware,
    read_keys,
)
from torchweave.serving.http.openapi import install_openapi
from torchweave.serving.http.proxy import ProxyMiddleware
from torchweave.serving.http.routes import chat, completions, live, metrics, models, status, tokens
from torchweave.serving.metrics.live import Live
from torchweave.serving.metrics.prometheus import HttpMetricsMiddleware, HttpRequestCounters, PrometheusMetrics
from torchweave.serving.service import Service


def create_app(
    client: Replicas,
    settings: ServerConfig,
    wait: bool = False,
    poll_remote_metrics: Callable[[Sequence[EngineClient], HttpRequestCounters], Awaitable[None]] | None = None,
    primary_socket: str | None = None,
) -> FastAPI:
    """The application. It starts the engines when it starts, and ends them with itself. Routes find their `Service` as
    `request.app.state.service`.

    Args:
        wait: it answers nothing before it is known whether requests are taken; else it serves `/health` and `/ready` at once.
        poll_remote_metrics: updates the metrics of the other HTTP processes, see `FrontendGroup.poll_metrics`.
        primary_socket: Unix socket of the HTTP process that answers all but requests for answers; None: this one does.

    Raises:
        ValueError: a file that `settings` names cannot be read.
    """
    service = Service(client, settings)
    keys = read_keys(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await client.start()
        opening = asyncio.create_task(service.open())
        try:
            if wait:
                await opening
            yield
        finally:
            opening.cancel()
            await client.stop()
            service.close()

    app = FastAPI(title="Torchweave", version=torchweave.__version__, lifespan=lifespan, redoc_url=None)
    app.state.service = service
    add_error_handlers(app)
    routers = [each.router for each in (chat, completions, status, models, tokens, metrics, live)]
    for router in routers:  # looked for in this order
        app.include_router(router)
    install_openapi(app)
    # Newer versions of FastAPI keep a router that they include as it is: its routes are not among their own.
    http = HttpRequestCounters(
        [route for owner in (app, *routers) for route in owner.routes if isinstance(route, Route)]
    )
    app.state.http = http
    app.state.metrics = PrometheusMetrics(client.engines, http, service.names[0])

    async def poll_metrics() -> None:
        if poll_remote_metrics is not None:
            await poll_remote_metrics(client.engines, http)

    app.state.poll_metrics = poll_metrics
    app.state.live = Live(service, poll_metrics)
    app.add_middleware(HeadMethodMiddleware)  # type: ignore[arg-type]
    if primary_socket is not None:
        app.add_middleware(ProxyMiddleware, address=primary_socket)  # type: ignore[arg-type]
    app.add_middleware(FastPathMiddleware, routers=(chat.router, completions.router))  # type: ignore[arg-type]
    app.add_middleware(AuthLimitsMiddleware, settings=settings, keys=keys, admission_pacer=client.admission_pacer)  # type: ignore[arg-type]
    app.add_middleware(RequestIdMiddleware)  # type: ignore[arg-type]
    if settings.allowed_origins:  # around the guard: a browser asks without the key whether it may ask with it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(HttpMetricsMiddleware, counts=http)  # around the guard: what it refuses is counted too
    return app
