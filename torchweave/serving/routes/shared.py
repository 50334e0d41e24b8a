"""What routes share."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from torchweave.serving.service import Service


def service_of(request: Request) -> Service:
    """The server's state."""
    return request.app.state.service


def as_response(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def usage(num_prompt_tokens: int, num_answer_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
    }
