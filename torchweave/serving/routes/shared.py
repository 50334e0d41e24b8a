"""What routes share."""

from __future__ import annotations

from fastapi import Request

from torchweave.serving.errors import ApiError
from torchweave.serving.protocol import Generation
from torchweave.serving.service import Service


def service_of(request: Request) -> Service:
    """The server's state."""
    return request.app.state.service


def wants_usage(body: Generation) -> bool:
    """Whether a stream ends with the number of tokens.

    Raises:
        ApiError: 400, options of a stream for what is none.
    """
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError(400, "stream_options needs stream=true.", param="stream_options")
    return body.stream_options.include_usage
