"""The FastAPI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

import torchweave
from torchweave.config.options import ServerConfig
from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.errors import add_error_handlers
from torchweave.serving.http import (
    adapter_routes,
    control_routes,
    generation_routes,
    middleware,
    pooling_routes,
    responses_api,
    routes,
)
from torchweave.serving.http.openapi import install_openapi
from torchweave.serving.http.proxy import ProxyMiddleware
from torchweave.serving.metrics.live import Live
from torchweave.serving.metrics.prometheus import HttpRequestCounters, PrometheusMetrics
from torchweave.serving.service import Service


def create_app(
    client: Replicas,
    settings: ServerConfig,
    wait: bool = False,
    poll_remote_metrics: Callable[[Sequence[EngineClient], HttpRequestCounters], Awaitable[None]] | None = None,
    primary_socket: str | None = None,
) -> FastAPI:
    """Create the application. Its lifespan starts and ends the engines; routes find the `Service` in `app.state.service`.

    Args:
        wait: delay all responses until the start has succeeded or failed; otherwise `/health` and `/ready` respond at once.
        poll_remote_metrics: updates the metrics of the other HTTP processes, see `FrontendGroup.poll_metrics`.
        primary_socket: Unix socket of the HTTP process that handles all but generation requests; None: this process does.

    Raises:
        ValueError: a file named in `settings` cannot be read.
    """
    service = Service(client, settings)
    keys = middleware.read_keys(settings)

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
    routers = [generation_routes.router, responses_api.router, pooling_routes.router, routes.router]
    if settings.enable_control_routes:
        routers += [control_routes.router, adapter_routes.router]
    for router in routers:  # matched in this order
        app.include_router(router)
    install_openapi(app)
    if (root_path := settings.root_path) and (
        inside := [path for path in app.openapi()["paths"] if f"{path}/".startswith(f"{root_path}/")]
    ):
        raise ValueError(
            f"root_path={root_path} is the beginning of {inside[0]}, a path of this server; use another one"
        )
    # Newer versions of FastAPI do not copy the routes of included routers into `app.routes`.
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
    _add_middleware(app, client, settings, keys, primary_socket)
    return app


def _add_middleware(
    app: FastAPI, client: Replicas, settings: ServerConfig, keys: list[str], primary_socket: str | None
) -> None:
    """Add what handles requests before the routes, the innermost first."""
    app.add_middleware(middleware.HeadMethodMiddleware)  # type: ignore[arg-type]
    if primary_socket is not None:
        app.add_middleware(ProxyMiddleware, address=primary_socket)  # type: ignore[arg-type]
    routers = [generation_routes.router]
    if primary_socket is None:  # others are passed on as they are
        routers += [responses_api.router, pooling_routes.router, routes.router]
    app.add_middleware(middleware.FastPathMiddleware, routers=routers, max_body_bytes=settings.max_body_bytes)  # type: ignore[arg-type]
    app.add_middleware(
        middleware.AuthLimitsMiddleware, settings=settings, keys=keys, admission_pacer=client.admission_pacer
    )  # type: ignore[arg-type]
    app.add_middleware(middleware.AnthropicErrorsMiddleware)  # type: ignore[arg-type]
    app.add_middleware(middleware.RequestIdMiddleware, warning_counts=app.state.http.warnings)  # type: ignore[arg-type]
    if settings.allowed_origins:  # outside the key check: browsers send preflight requests without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "x-torchweave-warning"),
        )
    # Outside the key check: counts rejected requests too.
    app.add_middleware(middleware.HttpMetricsMiddleware, counts=app.state.http)  # type: ignore[arg-type]
    if settings.root_path:
        app.add_middleware(middleware.RootPathMiddleware, root_path=settings.root_path)  # type: ignore[arg-type]
    for path in settings.middleware:
        own = middleware.load_middleware(path)
        if isinstance(own, type):
            app.add_middleware(own)  # type: ignore[arg-type]
        else:
            app.add_middleware(BaseHTTPMiddleware, dispatch=own)
