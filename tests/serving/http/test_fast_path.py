"""The fast path answers, rejects and counts requests without FastAPI's router."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response

from tests.serving.running import ServerProcess
from torchweave.serving.http.middleware import FastPathMiddleware
from torchweave.serving.openai.protocol import CompletionRequest

SMALL: dict[str, Any] = {"model": "demo", "prompt": "12+30=", "max_tokens": 4, "temperature": 0}
ONE = {"stream": True, "max_tokens": 1}
"""A stream of one token: of several, some may come together."""
BODIES = {
    "answer": json.dumps(SMALL),
    "two answers": json.dumps(SMALL | {"prompt": ["1+1=", "2+2="], "n": 2, "temperature": 1, "seed": 3}),
    "stream": json.dumps(SMALL | ONE | {"stream_options": {"include_usage": True}}),
    "unknown field": json.dumps(SMALL | {"max_token": 4}),
    "wrong type": json.dumps(SMALL | {"max_tokens": "4"}),
    "refused by the endpoint": json.dumps(SMALL | {"stream_options": {"include_usage": True}}),
    "refused by the engine": json.dumps(SMALL | {"prompt": [20] * 100_000}),
    "unknown model": json.dumps(SMALL | {"model": "other"}),
    "token beyond the vocabulary": json.dumps(SMALL | {"prompt": [10**30]}),
    "cut off": json.dumps(SMALL)[:-3],
    "a list": "[1, 2]",
    "nothing": "",
    "no text": b"\xff\xfe\x00",
    "half a surrogate": '{"model": "demo", "prompt": "\\ud800"}',
    "nested": "[" * 100_000,
}
SENTENCES = {
    "unknown field": "unknown field 'max_token'; did you mean max_tokens?",
    "wrong type": "max_tokens: Input should be a valid integer",
    "refused by the endpoint": "stream_options requires stream=true.",
    "refused by the engine": "maximum context length is 512 tokens",
    "unknown model": "The model 'other' is not served here",
    "token beyond the vocabulary": "outside 0..2**31 - 1",
    "cut off": "The body is not valid JSON: ",
    "a list": "The body must be a JSON object",
    "nothing": "The body must be a JSON object",
    "no text": "The body is not valid UTF-8 (at byte 0)",
    "half a surrogate": "half of a surrogate pair",
    "nested": "The body is nested too deeply",
}


def _ask(server: ServerProcess, path: str, body: str | bytes, kind: str) -> tuple[int, str, str]:
    answer = server.request("POST", path, content=body, headers={"Content-Type": kind})
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', answer.text)
    return answer.status_code, answer.headers["content-type"], text


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_every_json_type_are_answered_alike(server: ServerProcess, name: str):
    direct = _ask(server, "/v1/completions", BODIES[name], "application/json; charset=utf-8")
    assert direct == _ask(server, "/v1/completions", BODIES[name], "Application/vnd.api+JSON")
    answered = name in ("answer", "two answers", "stream")
    assert (direct[0] == 200) == answered, direct
    if not answered:
        error = json.loads(direct[2])["error"]
        assert direct[0] == (404 if name == "unknown model" else 400) and SENTENCES[name] in error["message"], error


def test_other_methods_and_kinds_are_left_to_fastapi(server: ServerProcess):
    assert server.get("/v1/completions").status_code == 405
    assert _ask(server, "/v1/completions", BODIES["answer"], "text/plain")[0] == 400


def test_they_are_counted_under_their_address(server: ServerProcess):
    def count() -> float:
        lines = [line for line in server.get("/metrics").text.splitlines() if "requests_total" in line]
        return sum(float(line.split()[-1]) for line in lines if '"/v1/completions"' in line and '"200"' in line)

    before = count()
    _ask(server, "/v1/completions", BODIES["answer"], "application/json")
    assert count() == before + 1


def test_fast_path_requests_bypass_fastapi():
    router, reached = APIRouter(), list[str]()

    async def answer(body: CompletionRequest, request: Request) -> Response:
        return Response(f"{body.max_tokens}")

    router.add_api_route("/v1/completions", answer, methods=["POST"])

    async def fastapi(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await Response("routed")(scope, receive, send)

    def said(path: str, body: bytes) -> bytes:
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        asyncio.run(
            FastPathMiddleware(fastapi, [router], 1 << 20)(
                {"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send
            )
        )
        return b"".join(parts)

    assert said("/v1/completions", b'{"prompt": "1+1=", "max_tokens": 7}') == b"7" and not reached
    assert b"prompt: expected a text" in said("/v1/completions", b'{"prompt": 1}') and not reached
    assert said("/v1/models", b"{}") == b"routed" and reached == ["/v1/models"]
