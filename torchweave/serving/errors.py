"""Faults in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`, each message one useful sentence."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from torchweave.serving.engine_client.request_stream import EngineUnavailable

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told instead of an answer."""

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
    """What a client is told of a fault that was met while its request was answered."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"The server met a fault of its own: {type(error).__name__}.", code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every fault of every route in the one form."""

    async def ours(_: Request, error: Exception) -> JSONResponse:
        return api_error(error).response

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, _http_sentence(error), headers=dict(error.headers or {})).response

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response

    for kind in (ApiError, EngineUnavailable, ValueError):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, ours)


def _http_sentence(error: HTTPException) -> str:
    if error.status_code == 400:
        return _unread_sentence(error.__cause__)
    sentences = {
        404: "There is no such address; /docs lists those that there are.",
        405: "This address does not take this method; /docs lists what it takes.",
    }
    return sentences.get(error.status_code, str(error.detail))


def _unread_sentence(why: BaseException | None) -> str:
    """Why a body could not be read, where it is not that it is no JSON."""
    if isinstance(why, UnicodeDecodeError):
        return f"The body is not text in UTF-8 (byte {why.start} is not); send JSON in UTF-8."
    if isinstance(why, RecursionError):
        return "The body is nested too deeply; send JSON with fewer levels."
    return "The body cannot be read: it holds a number of thousands of digits, or is no JSON; send JSON without."


def _invalid(error: RequestValidationError) -> ApiError:
    """The first fault of a body, named by its field."""
    first = error.errors()[0]
    where = [
        part for part in first["loc"] if part != "body" and " " not in str(part)
    ]  # kinds of a body are "a text", ...
    param = ".".join(map(str, where)) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    sentence = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    if param is None and first["type"] == "value_error":
        return ApiError(400, sentence if sentence.endswith("?") else f"{sentence}.")
    if param is None:
        return ApiError(400, "The body must be a JSON object, sent as Content-Type: application/json.")
    return ApiError(400, f"{param}: {sentence}" + ("" if sentence.endswith("?") else "."), param=param)
