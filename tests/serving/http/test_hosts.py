"""Names: of hosts that a server without a key takes requests for, and of models that clients see."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.watched import asking
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.errors import ApiError
from torchweave.serving.http.app import create_app
from torchweave.serving.service import Service


def ask(name: str, path: str = "/tokenize", **options: Any) -> httpx.Response:
    app = create_app(create_replicas(EngineConfig(model="demo")), ServerConfig(**options))

    async def send() -> httpx.Response:
        async with asking(app) as http:
            return await http.get(path, headers={"Host": name})

    return asyncio.run(send())


REFUSED, ANSWERED = 403, 405


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "a.localhost", "LOCALHOST", "10.0.0.3:80"]
)
def test_requests_for_this_machine_are_answered(host: str) -> None:
    assert ask(host).status_code == ANSWERED


def test_requests_for_a_foreign_name_are_refused_where_no_key_is_set() -> None:
    foreign = ask("evil.example.com:8000")
    assert foreign.status_code == REFUSED and "allowed_hosts" in foreign.json()["error"]["message"]
    assert ask("localhost.example.com").status_code == REFUSED and ask("127.0.0.1.example.com").status_code == REFUSED
    for malformed in ("[::1].example.com", "[::1]example.com:80", "[::1", "localhost:80:80", "[localhost]"):
        assert ask(malformed).status_code == REFUSED, malformed
    assert ask("evil.example.com", "/health").status_code == 503, "probes are answered"
    assert ask("evil.example.com", api_key=("sesame",)).status_code == 401
    assert ask("Chat.example.com", allowed_hosts=("chat.example.com",)).status_code == ANSWERED
    assert ask("evil.example.com", allowed_hosts=("*",)).status_code == ANSWERED
    assert ask("evil.example.com", host="0.0.0.0").status_code == ANSWERED, "it is open to everybody"


def test_the_path_of_a_model_is_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "my-model"
    folder.mkdir(parents=True)
    service = Service(create_replicas(EngineConfig(model=str(folder))), ServerConfig())
    assert service.names == ("my-model",)
    assert (
        service.check_model(str(folder)) == service.check_model("my-model") == service.check_model(None) == "my-model"
    )
    with pytest.raises(ApiError) as refused:
        service.check_model("other")
    assert "secret" not in refused.value.message
    named = Service(create_replicas(EngineConfig(model="org/model")), ServerConfig())
    assert named.names == ("org/model",)
