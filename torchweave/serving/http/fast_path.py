"""Fast path for generation requests around FastAPI's routing, which would double the cost of a request.

FastAPI still has the routes: it documents them and reports invalid bodies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_type_hints

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel

from torchweave.serving.engine_client.request_stream import EngineUnavailable
from torchweave.serving.errors import ApiError, api_error
from torchweave.serving.http.middleware import App, Receive, Send, header, replay


class FastPathMiddleware:
    """ASGI middleware inside `AuthLimitsMiddleware` (which has read the body) that calls a route's function directly.

    Args:
        routers: their routes must be `POST` with the arguments `body` and `request`.
    """

    def __init__(self, app: App, routers: Sequence[APIRouter]) -> None:
        self._app = app
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._routes: dict[str, tuple[APIRoute, type[BaseModel]]] = {
            route.path: (route, get_type_hints(route.endpoint)["body"]) for route in routes
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if match is None or header(scope, b"content-type").partition(b";")[0].strip().lower() != b"application/json":
            await self._app(scope, receive, send)
            return
        route, kind = match
        body = (await receive())["body"]
        try:
            request_body = kind.model_validate(json.loads(body))
        except (ValueError, RecursionError):  # FastAPI repeats the validation and reports the error
            await self._app(scope, replay(body, receive), send)
            return
        scope["route"] = route
        try:
            response = await route.endpoint(request_body, Request(scope, receive))
        except (ApiError, EngineUnavailable, ValueError) as error:
            response = api_error(error).response
        await response(scope, receive, send)
