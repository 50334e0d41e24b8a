"""The OpenAPI document as the server really answers: every fault in OpenAI's form, streams, and no status that never comes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAULTS = {
    "400": "What was asked cannot be; the message says why, and what to do",
    "401": "The API key is missing or not known here",
    "404": "The model is not served here",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The body is compressed",
    "429": "Too many requests wait; Retry-After says when to come again",
    "500": "A fault of the server",
    "503": "The model is being loaded, the server is shutting down, or the engine failed",
}
_COMMON_STATUSES = ("401", "500", "503")
_STREAMS = ("/v1/completions", "/v1/chat/completions")
_PROBES = ("/health", "/ready")  # tell why not in a form of their own
_NOT_RETURNED = ("HTTPValidationError", "ValidationError")


def install_openapi(app: FastAPI) -> None:
    """Give the application a document that holds."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            for name in _NOT_RETURNED:
                schemas.pop(name, None)
            schemas["Error"] = _ERROR
            for path, methods in found["paths"].items():
                for method, operation in methods.items():
                    _add_responses(path, method, operation["responses"])
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document


def _add_responses(path: str, method: str, responses: dict[str, Any]) -> None:
    """The responses of one operation."""
    responses.pop("422", None)
    statuses = _COMMON_STATUSES + (
        ("400", "404", "408", "413", "415", "429") if method == "post" else ("404",) if "{" in path else ()
    )
    for status in sorted(statuses):
        responses[status] = _fault(status)
    if path in _PROBES:
        responses["503"] = {"description": "Not so", "content": {"application/json": {"schema": {"type": "object"}}}}
    if path in _STREAMS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}


def _fault(status: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": _FAULTS[status], "content": content}
