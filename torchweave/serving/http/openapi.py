"""The OpenAPI document, corrected for the server's actual responses: OpenAI's error format, event streams, possible statuses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi


def _object(**properties: Any) -> dict[str, Any]:
    """JSON schema of an object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT: dict[str, Any] = {"type": "string"}
_OPTIONAL_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_OPTIONAL_TEXT, code=_OPTIONAL_TEXT))
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT)
_ERROR_DESCRIPTIONS = {
    "400": "Invalid request; the message says why and what to do",
    "401": "The API key is missing or unknown",
    "404": "The model is not served here",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The body is compressed",
    "429": "Too many requests are waiting; retry after Retry-After seconds",
    "500": "Internal server error",
    "503": "The model is being loaded, the server is shutting down, or the engine failed",
}
_COMMON_STATUSES = ("401", "500", "503")
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_PROBES = ("/health", "/ready")  # their 503 is not in OpenAI's format
_NOT_RETURNED = ("HTTPValidationError", "ValidationError")


def install_openapi(app: FastAPI) -> None:
    """Set `app.openapi`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            openapi = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = openapi.setdefault("components", {}).setdefault("schemas", {})
            for name in _NOT_RETURNED:
                schemas.pop(name, None)
            schemas["Error"], schemas["AnthropicError"] = _ERROR, _ANTHROPIC_ERROR
            for path, methods in openapi["paths"].items():
                for method, operation in methods.items():
                    _add_responses(path, method, operation["responses"])
            app.openapi_schema = openapi
        return app.openapi_schema

    app.openapi = document


def _add_responses(path: str, method: str, responses: dict[str, Any]) -> None:
    """Add the error responses and stream types of an operation."""
    responses.pop("422", None)
    statuses = _COMMON_STATUSES + (
        ("400", "404", "408", "413", "415", "429") if method == "post" else ("400", "404") if "{" in path else ()
    )
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    for status in sorted(statuses):
        responses[status] = {"description": _ERROR_DESCRIPTIONS[status], "content": content}
    if path in _PROBES:
        responses["503"] = {
            "description": "Not healthy or not ready",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    if path in _STREAMS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
