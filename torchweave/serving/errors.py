"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from torchweave.engine.control.errors import ControlError
from torchweave.engine.request import INVALID_LOGITS
from torchweave.serving.engine_client.request_stream import EngineUnavailable, RequestFailed
from torchweave.tokenizer import TextTooLong
from torchweave.utils.suggest import did_you_mean

_NAMED_FIELD = re.compile(r"(\w+) (?:must|requires|cannot) ")
"""The field that a message of the engine begins with."""
_KINDS = {
    "string_type": "a text",
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}
"""What pydantic expected, by its type of error."""
_UNION_MEMBER = re.compile(r"str|.* .*|.*[\[(].*")
"""Pydantic's names of a union's members (`str`, `list[str]`) and the tags of body variants (`a text`), which are no fields."""
_CONTROL_STATUSES = {"invalid": 400, "conflict": 409, "failed": 500}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def api_error(error: Exception) -> ApiError:
    """Convert an exception of a request handler into an error response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _http_sentence(error), headers=dict(error.headers or {}))
    if isinstance(error, (RequestValidationError, ValidationError)):
        return _invalid(error)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, ControlError):
        return ApiError(_CONTROL_STATUSES[error.kind], str(error), code=f"control_{error.kind}")
    if isinstance(error, RequestFailed) and str(error) == INVALID_LOGITS:
        return ApiError(500, INVALID_LOGITS, code="invalid_logits")
    if isinstance(error, ValueError):
        code = "context_length_exceeded" if isinstance(error, TextTooLong) else None
        named = _NAMED_FIELD.match(str(error))
        return ApiError(400, str(error), param=named[1] if named else None, code=code)
    return ApiError(500, f"Internal server error: {type(error).__name__}.", code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    """Return the errors of all routes in OpenAI's format."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 404:
            return ApiError(404, _unknown_path(app, request)).response
        return api_error(error).response

    for kind in (
        ApiError,
        EngineUnavailable,
        ControlError,
        ValueError,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(kind, handle)


def _unknown_path(app: FastAPI, request: Request) -> str:
    """Names the method, the path and the nearest path that takes this method."""
    method = "get" if request.method == "HEAD" else request.method.lower()
    known = [path for path, methods in app.openapi()["paths"].items() if method in methods]
    hint = did_you_mean(request.url.path, known, "see /docs for the available ones")
    return f"{request.method} {request.url.path[:200]}: this path does not exist; {hint}" + (
        "" if hint[-1] == "?" else "."
    )


def _http_sentence(error: HTTPException) -> str:
    if error.status_code == 400:
        return _unread_sentence(error.__cause__)
    if error.status_code == 405:
        return "This path does not support this method; see /docs for the supported ones."
    return str(error.detail)


def _unread_sentence(why: BaseException | None) -> str:
    """Why a body could not be parsed, for errors other than a JSON syntax error."""
    if isinstance(why, UnicodeDecodeError):
        return f"The body is not valid UTF-8 (at byte {why.start}); send JSON in UTF-8."
    if isinstance(why, RecursionError):
        return "The body is nested too deeply; send JSON with fewer levels."
    return (
        "The body could not be parsed: it is not JSON, or contains a number with thousands of digits; send valid JSON."
    )


def _invalid(error: RequestValidationError | ValidationError) -> ApiError:
    """The first validation error of a body, with the field's name."""
    listed = (
        error.errors(include_url=False, include_input=False) if isinstance(error, ValidationError) else error.errors()
    )
    errors = [(_field(each["loc"]), each) for each in listed]
    prefix = errors[0][0]
    where = max((place for place, _ in errors if place[: len(prefix)] == prefix), key=len)  # of a union: what fits best
    same_field = [each for place, each in errors if place == where]
    first = next((each for each in same_field if each["type"] == "too_long"), same_field[0])
    param = ".".join(where) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    sentence = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    if param is None and first["type"] == "value_error":
        return ApiError(400, sentence if sentence.endswith("?") else f"{sentence}.")
    if param is None:
        return ApiError(400, "The body must be a JSON object, sent as Content-Type: application/json.")
    if first["type"] == "too_short":
        return ApiError(400, f"{param} must hold at least {first.get('ctx', {})['min_length']} item.", param=param)
    if first["type"] == "too_long":
        most = first.get("ctx", {})["max_length"]
        return ApiError(400, f"{param} holds more than {most} items; give at most {most}.", param=param)
    if first["type"] == "extra_forbidden":
        sentence = "unknown field; leave it out"
    elif first["type"] in _KINDS:
        kinds = dict.fromkeys(_KINDS[each["type"]] for each in same_field if each["type"] in _KINDS)
        sentence = f"expected {' or '.join(kinds)}"
    return ApiError(400, f"{param}: {sentence}" + ("" if sentence.endswith("?") else "."), param=param)


def _field(place: tuple[int | str, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in place if part != "body" and not _UNION_MEMBER.fullmatch(str(part)))
