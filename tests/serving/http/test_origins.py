"""Cross-origin requests are allowed for the configured origins only."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.serving.watched import asking
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.validate import check_server
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.http.app import create_app

PAGE, OTHER = "https://chat.example.com", "https://other.example.com"
ALLOWED = "access-control-allow-origin"


def ask(method: str, path: str, origin: str, *allowed: str) -> httpx.Response:
    """As a browser does for a script of a page at `origin`; a preflight, where the method is OPTIONS."""
    settings = ServerConfig(allowed_origins=allowed, api_key=("sesame",))
    app = create_app(create_replicas(EngineConfig(model="demo")), settings)
    headers = {"Origin": origin}
    if method == "OPTIONS":
        asked = {"Method": "POST", "Headers": "authorization,content-type,x-stainless-lang"}
        headers |= {f"Access-Control-Request-{name}": value for name, value in asked.items()}

    async def send() -> httpx.Response:
        async with asking(app) as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(send())


def test_allowed_origins_may_send_requests() -> None:
    for allowed, told in ((PAGE, PAGE), ("*", "*")):
        before = ask("OPTIONS", "/v1/chat/completions", PAGE, allowed)
        assert before.status_code == 200 and before.headers[ALLOWED] == told
        assert "POST" in before.headers["access-control-allow-methods"]
        assert "x-stainless-lang" in before.headers["access-control-allow-headers"]
        assert ask("GET", "/version", PAGE, allowed).headers[ALLOWED] == told
        refused = ask("GET", "/v1/models", PAGE, allowed)
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        assert refused.status_code == 401 and refused.headers[ALLOWED] == told, "the page is to see why"


def test_other_origins_are_rejected() -> None:
    for allowed in ((), (PAGE,)):
        for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/version")):
            answer = ask(method, path, OTHER, *allowed)
            assert ALLOWED not in answer.headers and answer.is_success == (method == "GET")


@pytest.mark.parametrize("wrong", ["chat.example.com", f"{PAGE}/", f"{PAGE}/a", ""])
def test_malformed_origins_are_rejected(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not an origin: expected `\*`, or scheme, host and port"):
        check_server(EngineConfig("demo"), ServerConfig(allowed_origins=(PAGE, wrong)))
    check_server(EngineConfig("demo"), ServerConfig(allowed_origins=(PAGE, "*", "null", "http://localhost:3000")))
