"""Control calls over HTTP: two replicas behind two HTTP processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.running import SHORTER, ServerProcess, serving, wait_until

GREEDY = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[ServerProcess]:
    options = ("--dp", "2", "--api_server_count", "2", "--enable_control_routes", "--profile_dir", str(folder))
    with serving(*options, "--max_batch_size", "4", "--max_waiting_requests", "2") as running:
        yield running


def answer(running: ServerProcess, prompt: str = "12+30=") -> str:
    return running.client().completions.create(model="demo", prompt=prompt, **GREEDY).choices[0].text


def test_paused_replicas_keep_their_requests_and_new_ones_wait(pair: ServerProcess) -> None:
    expected = answer(pair)
    whole = pair.client().completions.create(model="demo", prompt="1+1=", **SHORTER).choices[0].text
    streams = [
        iter(pair.client().completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER)) for _ in range(4)
    ]
    texts = [next(stream).choices[0].text for stream in streams]
    assert pair.request("POST", "/pause?mode=keep").json() == {"status": "paused"}
    assert pair.get("/is_paused").json() == {"is_paused": True}
    assert pair.request("POST", "/reset_prefix_cache").json() == {"success": False}
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(answer, pair) for _ in range(4)]
        assert wait_until(lambda: pair.get("/load").json()["server_load"] >= 5)
        assert not any(each.done() for each in waiting)
        assert pair.request("POST", "/resume").json() == {"status": "resumed"}
        assert [each.result() for each in waiting] == [expected] * 4
    for text, stream in zip(texts, streams, strict=True):
        assert text + "".join(chunk.choices[0].text for chunk in stream) == whole
    assert pair.get("/is_paused").json() == {"is_paused": False}


def test_abort_answers_all_and_the_wait_is_bounded(pair: ServerProcess) -> None:
    stream = pair.client().completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER)
    next(iter(stream))
    assert pair.request("POST", "/pause").status_code == 200
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    body = {"model": "demo", "prompt": "1+1=", "max_tokens": 2, "n": 10, "temperature": 1}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(pair.post, "/v1/completions", body)
        assert wait_until(lambda: pair.get("/load").json()["server_load"] == 10)
        assert pair.post("/v1/completions", body | {"n": 4}).status_code == 429
        assert pair.request("POST", "/resume").status_code == 200
        assert len(first.result().json()["choices"]) == 10


def test_prefix_caches_of_both_are_reset(pair: ServerProcess) -> None:
    for number in range(4):
        pair.post("/v1/completions", {"model": "demo", "prompt": [number + 5] * 100, "max_tokens": 1})
    assert wait_until(lambda: pair.request("POST", "/reset_prefix_cache").json()["success"])
    body = {"model": "demo", "prompt": [5] * 100, "max_tokens": 1}
    first, second = (pair.post("/v1/completions", body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0 < second["prompt_tokens_details"]["cached_tokens"]


def test_profiles_of_both(pair: ServerProcess, folder: Path) -> None:
    assert pair.post("/start_profile", {}).status_code == 200
    again = pair.post("/start_profile", {"num_steps": 3})
    assert again.status_code == 409
    assert again.json()["error"]["message"] == (
        "Replica 0: A profile runs already; stop it first. Replica 1: A profile runs already; stop it first."
    )
    answer(pair)
    files = pair.request("POST", "/stop_profile").json()["files"]
    assert len(files) == 2 and all(Path(file).parent == folder and Path(file).stat().st_size for file in files)
    assert pair.request("POST", "/stop_profile").status_code == 409
    assert pair.post("/start_profile", {"num_steps": -1}).status_code == 400
    assert pair.post("/start_profile", {"folder": "/tmp"}).status_code == 400
    assert pair.request("POST", "/pause?mode=stop").status_code == 400
    assert answer(pair)


def test_routes_exist_only_where_an_option_enables_them(server: ServerProcess) -> None:
    for path in ("/pause", "/resume", "/reset_prefix_cache", "/start_profile", "/stop_profile"):
        assert server.request("POST", path).status_code == 404
    assert server.get("/is_paused").status_code == 404
    assert "/pause" not in json.dumps(server.get("/openapi.json").json()["paths"])
