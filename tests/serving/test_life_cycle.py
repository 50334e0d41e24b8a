"""Life cycle of a server: keys, limits, disconnecting clients, draining, and death of the engine."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving.metrics.test_metrics import values_of
from tests.serving.running import (
    ENGINE_NAME,
    LONG,
    SHORTER,
    ServerProcess,
    cpu_seconds,
    finish_reason,
    free_port,
    name,
    serve_command,
    serving,
    wait_until,
)

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two requests at once, two that wait, and keys in a file."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("sesame\nmellon\n", encoding="utf-8")
    limits = (
        "--max_batch_size",
        "2",
        "--max_waiting_requests",
        "2",
        "--max_body_bytes",
        "5000",
        "--request_timeout",
        "240",
    )
    tokens = ("--max_request_tokens", "1000", "--max_request_sequences", "6")
    with serving("--api_key_file", str(keys), *limits, *tokens) as running:
        yield running


def stream_long(guarded: ServerProcess, key: str = "sesame") -> openai.Stream[Any]:
    return guarded.client(key).completions.create(model="demo", prompt="1+1=", stream=True, **LONG)


def is_empty(guarded: ServerProcess) -> bool:
    """The engine's metrics report no running request and no used block."""
    stats = engine_stats(guarded)
    return stats.get("numRunningRequests") == 0 and stats["Used KV cache blocks"] == 0


def engine_stats(guarded: ServerProcess) -> dict[str, Any]:
    return guarded.get("/statistics", headers=KEY).json()


# -- keys and limits ---------------------------------------------------------------------------------------------------


def test_api_keys_are_checked(guarded: ServerProcess) -> None:
    assert guarded.client("mellon").models.list().data
    with pytest.raises(openai.AuthenticationError, match="API key is unknown"):
        guarded.client("wrong").models.list()
    refused = guarded.get("/v1/models")
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/version"):
        assert guarded.get(path).status_code == 200


def test_long_bodies_are_refused(guarded: ServerProcess) -> None:
    body = {"model": "demo", "prompt": "a" * 6000}
    assert guarded.post("/v1/completions", body, headers=KEY).status_code == 413

    def in_parts() -> Iterator[bytes]:
        yield from [b'{"prompt": "', *([b"a" * 500] * 20), b'"}']

    headers = {"Content-Type": "application/json"} | KEY
    assert guarded.request("POST", "/v1/completions", content=in_parts(), headers=headers).status_code == 413


def test_tokens_of_a_request_are_limited(guarded: ServerProcess) -> None:
    client = guarded.client("sesame")
    with pytest.raises(openai.BadRequestError, match="this server allows 1000"):
        client.completions.create(model="demo", prompt="1+1=", max_tokens=400, n=3)
    with pytest.raises(openai.BadRequestError, match="at most 4 to one request"):  # 2 run and 2 wait
        client.completions.create(model="demo", prompt=["1"] * 5)


def test_a_full_queue_is_429_with_retry_after(guarded: ServerProcess) -> None:
    streams = []
    try:
        for _ in range(4):
            stream = stream_long(guarded)
            streams.append(stream)
        with pytest.raises(openai.RateLimitError, match="2 requests are waiting") as refused:
            guarded.client("sesame").completions.create(model="demo", prompt="1+1=")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert next(iter(streams[0])).choices[0].text != ""  # admitted requests are unaffected
    finally:
        for stream in streams:
            stream.close()
    answer = wait_for_answer(guarded)
    assert answer == "2"


def wait_for_answer(guarded: ServerProcess) -> str:
    """The answer to a question, asked again while the queue is full."""
    client = guarded.client("sesame").with_options(max_retries=5)
    return client.completions.create(model="demo", prompt="1+1=", temperature=0).choices[0].text


# -- clients that leave ------------------------------------------------------------------------------------------------


def test_disconnecting_clients_leak_nothing(guarded: ServerProcess) -> None:
    chance = random.Random(4)
    host, port = guarded.url.removeprefix("http://").split(":")
    body = '{"model":"demo","prompt":"1+1=","max_tokens":200,"temperature":0,"ignore_eos":true,"stream":STREAM}'

    def leave(stream: bool, when: float, cut: int | None) -> None:
        text = body.replace("STREAM", str(stream).lower())
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nContent-Length: {len(text)}\r\n"
        request = f"{head}Content-Type: application/json\r\n\r\n{text}".encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request[:cut])
            time.sleep(when)

    with ThreadPoolExecutor(8) as pool:
        for number in range(40):
            cut = chance.randrange(10, 300) if number % 4 == 0 else None
            pool.submit(leave, chance.random() < 0.5, chance.random() * 0.2, cut)
    assert wait_until(lambda: is_empty(guarded)), engine_stats(guarded)
    assert wait_for_answer(guarded) == "2"


def test_invalid_request_does_not_affect_others(guarded: ServerProcess) -> None:
    stream = guarded.client("sesame").completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER)
    chunks = iter(stream)
    next(chunks)
    for body in ({"prompt": [10**6]}, {"prompt": ""}, {"prompt": "a" * 600}, {"prompt": "a", "temperature": -1}):
        assert guarded.post("/v1/completions", {"model": "demo", **body}, headers=KEY).status_code in (200, 400)
    assert sum(len(chunk.choices[0].text) > 0 for chunk in chunks) > 10


def test_a_reasoning_effort_that_the_template_does_not_read_is_left_out(guarded: ServerProcess) -> None:
    asked = {"messages": [{"role": "user", "content": "1+1="}], "reasoning_effort": "low", "max_tokens": 2}
    answer = guarded.post("/v1/chat/completions", asked, headers=KEY)
    assert answer.status_code == 200 and "reasoning_effort" in answer.headers["x-torchweave-warning"]


def test_an_idle_server_takes_less_than_a_hundredth_of_a_core(guarded: ServerProcess) -> None:
    assert wait_until(lambda: is_empty(guarded))
    pids, shares = (guarded.process.pid, guarded.engine_pid()), list[float]()
    while len(shares) < 3 and min(shares, default=1.0) >= 0.01:  # what the tests before have left to do is not idleness
        time.sleep(0.3)
        begin, before = time.monotonic(), sum(map(cpu_seconds, pids))
        time.sleep(2)
        shares.append((sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - begin))
    assert min(shares) < 0.01, shares


# -- the beginning and the end -----------------------------------------------------------------------------------------


def test_starting_server_reports_progress_and_its_engine_exits_with_it() -> None:
    command = [*serve_command("demo", "--port", str(port := free_port()))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    starting = ServerProcess(f"http://127.0.0.1:{port}", process)  # type: ignore[arg-type]
    try:
        assert wait_until(lambda: answers(starting))
        assert starting.get("/health").status_code == 200
        ready = starting.get("/ready")
        assert ready.status_code == 503 and ready.json()["engine"] == "starting"
        refused = starting.post("/v1/completions", {"prompt": "1+1="})
        assert refused.status_code == 503 and "being loaded" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert wait_until(lambda: any(bar["title"] for bar in starting.get("/ready").json().get("progress", [])))
        engine = starting.engine_pid()
        assert name(engine).startswith(ENGINE_NAME)
    finally:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not name(engine).startswith(ENGINE_NAME))


_CAPTURED_FROM = """
import sys
from torchweave import LLM, TorchCompileConfig
config = TorchCompileConfig(enable_inductor=False, compile_cache_dir=sys.argv[1])
with LLM("demo", device="cpu", cpu_kv_cache_gib=0.02, torch_compile_config=config) as llm:
    print([each["source"] for each in llm.report.select("capture")])
"""
"""A process of its own, as tests before may have changed what the cache's key depends on."""


@pytest.mark.whole
def test_two_servers_start_on_one_cold_compile_cache(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled = ("--device", "cpu", "-O2", "-cc.enable_inductor=false", f"-cc.compile_cache_dir={tmp_path / 'cache'}")

    def ask(number: int) -> str:
        with serving(*compiled) as server:
            started.wait(200)
            answer = server.client().completions.create(model="demo", prompt=f"{number}+30=", temperature=0)
            return answer.choices[0].text

    started = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, (12, 13))) == ["42", "43"]
    assert capfd.readouterr().err == "", "no warning"
    warm = [sys.executable, "-c", _CAPTURED_FROM, str(tmp_path / "cache")]
    assert subprocess.run(warm, capture_output=True, text=True, check=True).stdout == "['cache']\n"
    assert [path.suffix for path in (tmp_path / "cache").glob("*/*")] == [".weave"]


def test_http_process_does_not_import_torch(server: ServerProcess) -> None:
    client = server.client()
    messages: Any = [{"role": "user", "content": "what is 20 + 22?"}]
    assert client.chat.completions.create(model="demo", messages=messages, temperature=0).choices[0].message.content
    guided = {"guided_regex": "[0-9]{2}", "bad_words": ["42"]}
    answer = client.completions.create(model="demo", prompt="20+22=", logprobs=1, extra_body=guided)
    assert len(answer.choices[0].text) == 2 and answer.choices[0].text != "42"
    assert not has_torch(server.process.pid) and has_torch(server.engine_pid())


def has_torch(pid: int) -> bool:
    """Whether a process has torch's libraries."""
    return "/libtorch_python" in Path(f"/proc/{pid}/maps").read_text()


def answers(server: ServerProcess) -> bool:
    try:
        return server.get("/version").status_code == 200
    except httpx.HTTPError:
        return False


def during_a_stream(client: openai.OpenAI, act: Callable[[], None]) -> tuple[BaseException | None, float]:
    """Begin a long answer, act, and read on; returns the error and the seconds from the act to the end."""
    chunks = iter(client.completions.create(model="demo", prompt="1+1=", stream=True, **LONG))
    next(chunks)
    act()
    begin = time.monotonic()
    try:
        list(chunks)
    except Exception as fault:
        return fault, time.monotonic() - begin
    return None, time.monotonic() - begin


def cache_metrics(server: ServerProcess) -> list[float]:
    """Blocks of the KV cache, and tokens that were looked up and found in it."""
    found = values_of(server.get("/metrics").text)
    return [found[name, ()] for name in ("kv_cache_blocks", "prefix_cache_queries_total", "prefix_cache_hits_total")]


def test_the_engine_is_started_again_by_option_and_sigterm_drains() -> None:
    with serving("--restart_engine", "--max_batch_size", "2", "--drain_timeout", "2") as server:
        pid = server.engine_pid()
        blocks = server.get("/live").json()["blocks"]["total"]
        assert cache_metrics(server) == [blocks, 0, 0] and blocks > 0, "they are there before the first step"
        for _ in range(2):
            server.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
        assert wait_until(lambda: cache_metrics(server) == [blocks, 64, 32]), cache_metrics(server)
        error, seconds = during_a_stream(server.client(), lambda: os.kill(pid, signal.SIGKILL))
        assert isinstance(error, openai.APIError) and "ended unexpectedly" in str(error) and seconds < 60
        assert server.get("/ready").status_code == 503
        assert wait_until(lambda: server.get("/ready").status_code == 200)
        assert server.engine_pid() != pid
        assert cache_metrics(server) == [blocks, 64, 32], "what was counted outlives the engine"
        server.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
        assert wait_until(lambda: cache_metrics(server) == [blocks, 96, 32]), cache_metrics(server)

        client = server.client()
        # A stream is there when its first byte is: the short one is the first in the queue.
        short = client.completions.create(model="demo", prompt="1+1=", max_tokens=20, temperature=0, stream=True)
        streams = [client.completions.create(model="demo", prompt="1+1=", stream=True, **LONG) for _ in range(8)]
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: server.get("/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            server.client().completions.create(model="demo", prompt="1+1=")
        assert server.get("/health").status_code == 200
        assert "".join(chunk.choices[0].text for chunk in short) == "2"
        with pytest.raises(openai.APIError, match="was shut down"):
            list(streams[-1])
        assert server.process.wait(240) == 0


def test_second_signal_ends_the_server_at_once_with_an_error_to_clients(capfd: pytest.CaptureFixture[str]) -> None:
    """All HTTP processes and the engine end."""
    with serving("--api_server_count", "3") as server, ThreadPoolExecutor(1) as pool:
        pids = server.pids("tw-http-")
        assert len(pids) == 2
        whole = pool.submit(server.post, "/v1/completions", {"prompt": "1+1=", "max_tokens": 450, "ignore_eos": True})
        stream = server.client().completions.create(model="demo", prompt="1+1=", stream=True, **LONG)
        assert wait_until(lambda: server.get("/live").json()["requests"]["open"] == 2)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # nor does it wait for an engine that hangs
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: server.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        answer = whole.result()
        assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]
        assert server.process.wait(240) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in (*pids, engine))
    assert capfd.readouterr().err == ""


def test_ctrl_c_in_a_terminal_drains_too() -> None:
    """It goes to every process of the group."""
    with serving("--tp", "2", apart=True) as server:
        asked = SHORTER | {"max_tokens": 80}  # a step of two ranks takes several times as long as one of a single rank
        stream = server.client().completions.create(model="demo", prompt="1+1=", stream=True, **asked)
        chunks = iter(stream)
        next(chunks)
        os.killpg(server.process.pid, signal.SIGINT)
        assert wait_until(lambda: server.get("/ready").status_code == 503)
        assert finish_reason(chunks) == "length"
        assert server.process.wait(240) == 0


def test_engine_death_is_reported_and_ends_the_server(guarded: ServerProcess) -> None:
    """The last test of this server."""
    codes: list[int] = []

    def watch() -> None:
        while guarded.process.poll() is None:
            try:
                codes.append(guarded.get("/health").status_code)
            except httpx.HTTPError:
                return
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    error, seconds = during_a_stream(guarded.client("sesame"), lambda: os.kill(guarded.engine_pid(), signal.SIGKILL))
    assert isinstance(error, openai.APIError) and "ended unexpectedly" in str(error) and seconds < 60
    assert guarded.process.wait(240) == 1
    watcher.join()
    assert 503 in codes
