"""The HTTP application: routes over a `Service`. Further routers are added to what `create_app` returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

import torchweave
from torchweave.config.options import ServerConfig
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.frontends.group import Frontends
from torchweave.serving.frontends.proxy import Relay
from torchweave.serving.http.errors import add_error_handlers
from torchweave.serving.http.fast_path import Direct
from torchweave.serving.http.middleware import Guard, Heads, RequestIds, read_keys
from torchweave.serving.http.openapi import describe
from torchweave.serving.http.routes import chat, completions, live, metrics, models, status, tokens
from torchweave.serving.metrics.live import Live
from torchweave.serving.metrics.prometheus import HttpCounts, HttpMeter, Metrics
from torchweave.serving.service import Service


def create_app(
    client: Replicas,
    settings: ServerConfig,
    wait: bool = False,
    others: Frontends | None = None,
    first: str | None = None,
) -> FastAPI:
    """The application. It starts the engines when it starts, and ends them with itself. Routes find their `Service` as
    `request.app.state.service`.

    Args:
        wait: it answers nothing before it is known whether requests are taken; else it serves `/health` and `/ready` at once.
        others: HTTP processes whose requests count here too.
        first: Unix socket of the HTTP process that answers all but requests for answers; None: this one does.

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
    describe(app)
    # Newer versions of FastAPI keep a router that they include as it is: its routes are not among their own.
    http = HttpCounts([route for owner in (app, *routers) for route in owner.routes if isinstance(route, Route)])
    app.state.http = http
    app.state.metrics = Metrics(client.engines, http, service.names[0])

    async def look() -> None:
        if others is not None:
            await others.look(client.engines, http)

    app.state.look = look
    app.state.live = Live(service, look)
    app.add_middleware(Heads)  # type: ignore[arg-type]
    if first is not None:
        app.add_middleware(Relay, address=first)  # type: ignore[arg-type]
    app.add_middleware(Direct, routers=(chat.router, completions.router))  # type: ignore[arg-type]
    app.add_middleware(Guard, settings=settings, keys=keys, turns=client.turns)  # type: ignore[arg-type]
    app.add_middleware(RequestIds)  # type: ignore[arg-type]
    if settings.allowed_origins:  # around the guard: a browser asks without the key whether it may ask with it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(HttpMeter, counts=http)  # around the guard: what it refuses is counted too
    return app
