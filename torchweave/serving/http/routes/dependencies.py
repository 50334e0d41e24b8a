"""Helpers of the routes."""

from __future__ import annotations

from fastapi import Request

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.protocol import Generation, StreamOptions
from torchweave.serving.service import Service


def service_of(request: Request) -> Service:
    """The server's state."""
    return request.app.state.service


def stream_options(body: Generation) -> StreamOptions:
    """Return the stream options of a request.

    Raises:
        ApiError: 400, `stream_options` without `stream`.
    """
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise ApiError(400, "stream_options requires stream=true.", param="stream_options")
    return body.stream_options
