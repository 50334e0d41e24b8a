"""Where a server listens and what stands around it: TLS, Unix sockets, the user's middleware; and templates that options set."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.serving.http.test_listener import LAST, echo
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.http.app import create_app
from torchweave.serving.http.chat_template import encode
from torchweave.serving.http.listener import UvicornServer, listen, listen_at, num_http_processes, tls_options
from torchweave.serving.openai.protocol import ChatRequest
from torchweave.serving.request_warnings import RequestWarnings


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, file = str(folder / "key.pem"), str(folder / "cert.pem")
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", "req", *options, "-keyout", key, "-out", file], check=True, capture_output=True)
    return file, key


def answer(door: socket.socket, options: dict[str, Any], address: Any, **client: Any) -> bytes:
    """What a server at `door` answers over a connection to `address`."""

    async def run() -> bytes:
        uvicorn = UvicornServer(echo, **options)
        serving = asyncio.create_task(uvicorn.serve(sockets=[door]))
        await uvicorn.listening.wait()
        opening = (
            asyncio.open_unix_connection(address)
            if isinstance(address, str)
            else asyncio.open_connection(*address, **client)
        )
        try:
            reader, writer = await opening
            writer.write(LAST)
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            uvicorn.should_exit = True
            await serving

    with door:
        return asyncio.run(run())


def test_a_server_speaks_https(certificate: tuple[str, str]) -> None:
    file, key = certificate
    settings = ServerConfig(ssl_certfile=file, ssl_keyfile=key)
    door = listen("127.0.0.1", 0)
    trusted = ssl.create_default_context(cafile=file)
    found = answer(door, tls_options(settings), door.getsockname(), ssl=trusted, server_hostname="localhost")
    assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"<POST /last abcdefgh>")
    assert tls_options(ServerConfig()) == {} and num_http_processes(None, one_address=True) == 1


def test_a_client_without_a_certificate_is_refused_where_one_is_required(certificate: tuple[str, str]) -> None:
    file, key = certificate
    settings = ServerConfig(ssl_certfile=file, ssl_keyfile=key, ssl_ca_certs=file, ssl_cert_reqs=2)
    trusted = ssl.create_default_context(cafile=file)
    found = []
    for known in (False, True):
        door = listen("127.0.0.1", 0)
        if known:
            trusted.load_cert_chain(file, key)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            found.append(
                answer(door, tls_options(settings), door.getsockname(), ssl=trusted, server_hostname="localhost")
            )
    assert found[-1].endswith(b"<POST /last abcdefgh>") and found[:-1] in ([], [b""])


def test_files_that_hold_no_certificate_are_refused(tmp_path: Path, certificate: tuple[str, str]) -> None:
    (tmp_path / "text").write_text("no certificate")
    for file, key in ((str(tmp_path / "none"), certificate[1]), (str(tmp_path / "text"), certificate[1])):
        with pytest.raises(ValueError, match=r"ssl_certfile=.* cannot be used"):
            tls_options(ServerConfig(ssl_certfile=file, ssl_keyfile=key))


def test_a_server_listens_at_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    assert answer(listen_at(path), {}, path).endswith(b"<POST /last abcdefgh>")
    # The socket that the first server left is replaced.
    with listen_at(path), pytest.raises(ValueError, match="a server listens there"):
        listen_at(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot listen at uds="):
        listen_at(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "x"


class Stamp:
    """ASGI middleware that adds a header to every response."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"1")]
            await send(message)

        await self.app(scope, receive, stamped)


async def refuse(request: Any, call_next: Any) -> Any:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("no", 418) if "x-no" in request.headers else await call_next(request)


def test_the_users_middleware_stands_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    settings = ServerConfig(middleware=(f"{here}.Stamp", f"{here}:refuse"), api_key=("k",))
    app = create_app(create_replicas(EngineConfig(model="demo")), settings)

    async def ask(**headers: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get("/v1/models", headers=headers)

    unknown = asyncio.run(ask())
    assert unknown.status_code == 401 and unknown.headers["x-stamp"] == "1"
    assert asyncio.run(ask(**{"x-no": "1"})).status_code == 418


@pytest.mark.parametrize("path", ["no_such_module:x", f"{__name__}:Nothing", f"{__name__}:LAST"])
def test_wrong_middleware_stops_the_start(path: str) -> None:
    with pytest.raises(ValueError, match="middleware="):
        create_app(create_replicas(EngineConfig(model="demo")), ServerConfig(middleware=(path,)))


def test_a_template_may_be_given_itself() -> None:
    app = create_app(
        create_replicas(EngineConfig(model="demo")), ServerConfig(chat_template="{{ messages[0].content }}")
    )
    assert app.state.service._template == "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="chat_template is not valid Jinja"):
        create_app(create_replicas(EngineConfig(model="demo")), ServerConfig(chat_template="{% if %}"))


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [({}, False), ({"chat_template_kwargs": {"enable_thinking": True}}, True), ({"reasoning_effort": "high"}, True)],
)
def test_variables_of_the_template_have_defaults(fields: dict[str, Any], thinks: bool) -> None:
    seen: dict[str, Any] = {}

    async def chat(messages: Any, **variables: Any) -> list[int]:
        seen.update(variables)
        return [1]

    async def resolve(messages: Any, _: int) -> Any:
        return messages

    tokenizer = SimpleNamespace(chat=chat, chat_template="{{ enable_thinking }}")
    service: Any = SimpleNamespace(
        settings=ServerConfig(default_chat_template_kwargs={"enable_thinking": False}),
        media=SimpleNamespace(resolve=resolve),
        require_tokenizer=lambda: tokenizer,
    )
    model: Any = SimpleNamespace(images=SimpleNamespace(max_images=0), max_model_len=64)
    body = ChatRequest(messages=[{"role": "user", "content": "hi"}], **fields)  # type: ignore[list-item]
    asyncio.run(encode(service, body, None, model, RequestWarnings()))
    assert seen["enable_thinking"] is thinks
