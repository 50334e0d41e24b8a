"""Three HTTP processes with one engine behave as one server; requests are repeated to reach all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.serving.http.malformed import attack
from tests.serving.metrics.test_metrics import values_of
from tests.serving.running import (
    LONG,
    SHORTER,
    ServerProcess,
    finish_reason,
    free_port,
    read_while_killed,
    serve_command,
    serving,
    wait_until,
)
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.validate import check_server
from torchweave.engine.request import NO_TOKENS, Output, Response, Responses
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.engine_client.request_metrics import RequestMetrics
from torchweave.serving.frontends.messages import FrontendMetrics, decode_from_frontend
from torchweave.serving.http.listener import num_http_processes
from torchweave.serving.ipc import messages
from torchweave.serving.ipc.messages import _LIFE_BITS
from torchweave.serving.ipc.processes import Silence
from torchweave.serving.ipc.shared_load import SharedLoad
from torchweave.serving.service import Service

SEVERAL = ("--api_server_count", "3")


@pytest.fixture(scope="module")
def three() -> Iterator[ServerProcess]:
    with serving(*SEVERAL, "--max_batch_size", "4", "--max_waiting_requests", "12", "--restart_engine") as running:
        yield running


def answer(running: ServerProcess, prompt: str, **options: Any) -> str:
    """On a connection of its own."""
    options = {"max_tokens": 8, "temperature": 0} | options
    with running.client().with_options(max_retries=8) as client:
        return client.completions.create(model="demo", prompt=prompt, **options).choices[0].text


def recent(running: ServerProcess) -> set[int]:
    """The requests that the page shows; modulo 3, the HTTP processes by which they came in."""
    return {each["id"] for each in running.get("/live").json()["recent"]}


def streams(running: ServerProcess, count: int) -> list[Any]:
    """Long answers that have begun, each on a connection of its own."""
    found = [
        iter(running.client().completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER))
        for _ in range(count)
    ]
    for each in found:
        next(each)
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


def test_all_frontends_answer_and_metrics_are_summed(server: ServerProcess, three: ServerProcess) -> None:
    prompts = [f"{left}+{right}=" for left in range(11, 16) for right in range(20, 26)]
    before = values_of(three.get("/metrics").text)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: answer(three, prompt), prompts))
    assert found == [answer(server, prompt) for prompt in prompts] and len(set(found)) > 8
    assert {each % 3 for each in recent(three)} == {0, 1, 2}
    after = values_of(three.get("/metrics").text)
    posts = ("http_requests_total", (("method", "POST"), ("path", "/v1/completions"), ("status", "200")))
    assert after[posts] - before.get(posts, 0) == len(prompts)
    for name in ("e2e_request_latency_seconds_count", "request_queue_time_seconds_count"):
        assert after[name, ()] - before[name, ()] == len(prompts), name
    live = three.get("/live").json()
    assert live["tokens"]["generated"] == after["generation_tokens_total", ()]
    assert sum(live["requests"]["ended"].values()) == after["e2e_request_latency_seconds_count", ()]
    assert live["requests"]["open"] == 0
    # The history has full seconds alone: the last requests appear when their second is over.
    assert wait_until(lambda: sum(three.get("/live").json()["history"]["ended"]) >= len(prompts))


EVERYTHING: list[tuple[str, str, bytes | None]] = [
    ("GET", "/version", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/none", None),
    ("GET", "/", None),
    ("GET", "/openapi.json", None),
    ("GET", "/nowhere?a=%C3%A4&b", None),
    ("GET", "/v1/completions", None),
    ("HEAD", "/health", None),
    ("DELETE", "/v1/completions", b"{}"),
    ("POST", "/tokenize", b'{"prompt": "12+30="}'),
    ("POST", "/v1/completions", b'{"prompt": "12'),
    ("POST", "/v1/completions", b'{"model": "demo", "prompt": "1+1=", "max_token": 1}'),
    ("POST", "/v1/completions", b'{"model": "demo", "prompt": "1+1=", "temperature": -1}'),
    ("POST", "/v1/chat/completions", b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}'),
    ("POST", "/v1/completions", b'{"model": "demo", "prompt": "12+30=", "temperature": 0, "max_tokens": 0}'),
]


@pytest.mark.parametrize(("method", "path", "body"), EVERYTHING)
def test_every_frontend_answers_alike(three: ServerProcess, method: str, path: str, body: bytes | None) -> None:
    def seen() -> tuple[int, dict[str, str], bytes]:
        headers = {"X-Request-Id": "mine"} | ({} if body is None else {"Content-Type": "application/json"})
        found = three.request(method, path, content=body, headers=headers)
        kept = {name: value for name, value in found.headers.items() if name != "date"}
        return found.status_code, kept, found.content

    answers = [seen() for _ in range(12)]  # one in 130 times by the same process
    assert answers.count(answers[0]) == len(answers)
    assert answers[0][0] < 500 and answers[0][1]["x-request-id"] == "mine"
    assert method != "HEAD" or (answers[0][0], answers[0][2]) == (200, b"")


def test_a_body_that_only_the_first_one_understands_is_streamed_by_it(three: ServerProcess) -> None:
    body = (
        b'{"model": "demo", "prompt": "1+1=", "stream": true, "temperature": 0, "max_tokens": 40, "ignore_eos": true}'
    )
    for _ in range(8):
        headers = {"Content-Type": "application/any+json"}
        found = three.request("POST", "/v1/completions", content=body, headers=headers)
        assert found.status_code == 200 and found.text.endswith("data: [DONE]\n\n"), found.text


def test_malformed_requests_harm_nobody(three: ServerProcess) -> None:
    found = asyncio.run(attack(three.url, 150, 7))
    assert not found.faults and found.statuses[400] > 20, found


# -- limits, and clients that leave ------------------------------------------------------------------------------------


def test_queue_limit_covers_all_frontends(three: ServerProcess) -> None:
    """Four run and twelve wait, on every frontend."""
    answering = [three.client().completions.create(model="demo", prompt="1+1=", stream=True, **LONG) for _ in range(16)]
    try:
        for _ in range(9):
            with pytest.raises(openai.RateLimitError, match="12 requests are waiting"):
                three.client().completions.create(model="demo", prompt="1+1=")
    finally:
        for stream in answering:
            stream.close()
    assert wait_until(lambda: is_empty(three))
    assert answer(three, "12+30=") == "42"


def is_empty(running: ServerProcess) -> bool:
    stats, live = running.get("/statistics").json(), running.get("/live").json()
    return stats["Used KV cache blocks"] == 0 == stats["numRunningRequests"] == live["requests"]["open"]


def test_frontends_do_not_import_torch(three: ServerProcess) -> None:
    answer(three, "20+22=")
    pids = three.pids("tw-http-")
    assert len(pids) == 2
    assert not any("/libtorch_python" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_dead_frontend_is_started_again(three: ServerProcess) -> None:
    """Its requests are lost, and stopped in the engine; others go on, and counters do not go back."""

    def end_of(stream: Any) -> str:
        try:
            return finish_reason(stream)
        except Exception as error:
            return str(error)

    posts = ("http_requests_total", (("method", "POST"), ("path", "/v1/completions"), ("status", "200")))
    counted = values_of(three.get("/metrics").text).get(posts, 0)
    before, victim = set(three.pids("tw-http-")), three.pids("tw-http-1")[0]
    answering = streams(three, 4)
    with ThreadPoolExecutor(len(answering)) as pool:
        reading = [pool.submit(end_of, stream) for stream in answering]
        os.kill(victim, signal.SIGKILL)
        ends = {each.result() for each in reading}
    assert all(end == "length" or "peer closed" in end or end == "Connection error." for end in ends), ends
    assert wait_until(lambda: three.get("/load").json() == {"server_load": 0})
    assert wait_until(lambda: len(three.pids("tw-http-1")) == 1 and three.pids("tw-http-1")[0] != victim)

    def new_one_answers() -> bool:
        assert answer(three, "12+30=") == "42"
        return any(each >> _LIFE_BITS for each in recent(three))

    assert wait_until(new_one_answers)
    assert set(three.pids("tw-http-")) - before == set(three.pids("tw-http-1")) and three.process.poll() is None
    assert values_of(three.get("/metrics").text)[posts] > counted


def test_all_frontends_report_engine_death_and_restart(three: ServerProcess) -> None:
    ends = read_while_killed(streams(three, 4), three.engine_pid())
    assert {why for why, _ in ends} == {"The engine process ended unexpectedly."}
    assert max(seconds for _, seconds in ends) < 60
    refused = three.post("/v1/completions", {"model": "demo", "prompt": "1+1="})
    assert refused.status_code == 503
    assert wait_until(lambda: three.get("/ready").status_code == 200)
    before, able = recent(three), set[int]()

    def all_answer() -> bool:
        assert answer(three, "12+30=") == "42"
        able.update(each % 3 for each in recent(three) - before)
        return able == {0, 1, 2}

    assert wait_until(all_answer), able


def test_sigterm_drains_all_frontends(three: ServerProcess) -> None:
    """The last test of this server."""
    pids = [*three.pids("tw-http-"), three.engine_pid()]
    answering = streams(three, 4)
    three.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: three.get("/ready").status_code == 503)
    for _ in range(6):
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            three.client().completions.create(model="demo", prompt="1+1=")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(finish_reason, answering)) == {"length"}
    assert three.process.wait(240) == 0
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@contextmanager
def starting(*options: str) -> Iterator[ServerProcess]:
    """A starting server, and its output on both streams."""
    port = free_port()
    command = serve_command("demo", *SEVERAL, "--port", str(port), *options)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield ServerProcess(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def started(*options: str) -> Iterator[ServerProcess]:
    with starting(*options) as running:
        assert running.process.stdout is not None and " serves " in running.process.stdout.readline()
        yield running


def test_the_death_of_one_of_them_ends_a_server_that_starts_and_it_does_not_say_that_it_serves() -> None:
    with starting() as running:
        assert wait_until(lambda: len(running.pids("tw-http-")) == 2)
        os.kill(running.pids("tw-http-")[1], signal.SIGKILL)
        greeting, said = running.process.communicate(timeout=240)
        assert running.process.returncode == 1 and not greeting
        assert "torchweave: HTTP process 2 of the server (process " in said and "killed by SIGKILL" in said


def test_a_process_that_sends_messages_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweave.serving.ipc.processes.PING_SECONDS", 0.02)
    silence = Silence()

    async def waits(count: int, message: bool) -> None:
        for _ in range(count):
            waiting = asyncio.create_task(silence.wait())
            await asyncio.sleep(0)
            if message:
                silence.end()
            await waiting

    asyncio.run(waits(3, message=True))
    assert silence.seconds == 0
    asyncio.run(waits(3, message=False))
    assert silence.seconds >= 0.06
    asyncio.run(waits(1, message=True))
    assert silence.seconds == 0


@pytest.mark.parametrize("first", [False, True])
def test_a_stopped_http_process_is_killed(first: bool) -> None:
    """It would hold its share of the connections for ever, and with the first one /health. Others are started again."""
    with started("--api_server_count", "2", "--engine_timeout", "3") as running:
        pids = [running.process.pid, *running.pids("tw-http-"), running.engine_pid()]
        time.sleep(5)  # longer than the timeout: processes that answer pings are kept
        assert running.get("/health").status_code == 200
        os.kill(pids[0 if first else 1], signal.SIGSTOP)
        if not first:
            assert wait_until(lambda: running.pids("tw-http-") not in ([], [pids[1]]))
            assert answer(running, "12+30=") == "42"
            running.process.send_signal(signal.SIGTERM)
        _, said = running.process.communicate(timeout=120)
        number, pid = (0, pids[0]) if first else (1, pids[1])
        assert f"HTTP process {number} of the server (process {pid}) has not answered for 3" in said
        assert first or "It is started again." in said
        assert running.process.returncode == (-signal.SIGKILL if first else 0)
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[1:]))


def test_engine_start_failure_is_reported_by_every_frontend() -> None:
    with starting() as running:
        engine = running.engine_pid()
        port = int(running.url.rpartition(":")[2])
        assert wait_until(lambda: is_listening(port))
        with socket.create_connection(("127.0.0.1", port)) as connection:  # only the first one listens by now
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            os.kill(engine, signal.SIGKILL)
            greeting, said = running.process.communicate(timeout=240)
        assert running.process.returncode == 1 and not greeting
        assert said.endswith("torchweave: The engine process ended unexpectedly.\n"), (
            said
        )  # after uvicorn's log line of the connection


def is_listening(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_a_signal_ends_all_of_them_while_they_start() -> None:
    with starting() as running:
        assert wait_until(lambda: len(running.pids("tw-http-")) == 2)
        assert wait_until(lambda: is_listening(int(running.url.rpartition(":")[2])))
        running.process.send_signal(signal.SIGTERM)
        greeting, said = running.process.communicate(timeout=120)
        assert running.process.returncode == 0 and not greeting and "Traceback" not in said, said


def test_a_model_that_the_engine_refuses_is_reported_once_and_all_processes_exit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    done = subprocess.run(serve_command(str(tmp_path), *SEVERAL), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr, done.stderr


def test_an_address_is_not_shared_with_another_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            serve_command("demo", *SEVERAL, "--port", port), capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 2 and "cannot listen on" in done.stderr


# -- in one process ----------------------------------------------------------------------------------------------------


def test_shared_load_sums_over_http_processes() -> None:
    shared_load = SharedLoad(engines=2, frontends=3)
    shared_load.write(1, 0, requests=4, pending_prefill_tokens=100)
    shared_load.write(1, 2, requests=5, pending_prefill_tokens=20)
    shared_load.write(0, 2, requests=7, pending_prefill_tokens=1)
    assert [shared_load.requests(each) for each in (0, 1)] == [7, 9] and shared_load.pending_prefill_tokens(1) == 120
    shared_load.write(1, 2, requests=0, pending_prefill_tokens=0)
    assert shared_load.requests(1) == 4


def test_engine_messages_reach_the_frontend_of_their_request() -> None:
    place = messages.ReplicaInfo(index=1, count=2, frontends=3)
    firsts = [list(islice(place.ids(frontend), 3)) for frontend in range(3)]
    assert firsts == [[1, 7, 13], [3, 9, 15], [5, 11, 17]]

    def said(item: Any) -> dict[int, Any]:
        return {
            frontend: messages.decode_from_engine(message) for frontend, message in messages.messages(item, place, True)
        }

    end = Response(11, Output(NO_TOKENS, "length"), True)
    ids, tokens = np.array([1, 7, 5], np.uint64), np.array([40, 50, 60], np.int32)
    found = said(Responses([end], ids, tokens))
    assert set(found) == {0, 2}, "nobody is woken for nothing"
    for each in found.values():
        assert list(each.new_tokens()) == [(1, 40), (7, 50), (5, 60)] and each.failing
    assert found[0].others == [] and [each.id for each in found[2].others] == [11]
    assert said(Responses()) == {}
    assert {who: said.id for who, said in said(messages.Accepted(9, "no")).items()} == {1: 9}
    moves = said(messages.RequestStateChanges([(1, "started"), (17, "paused"), (5, "answering")]))
    assert {who: each.moves for who, each in moves.items()} == {
        0: [(1, "started")],
        2: [(17, "paused"), (5, "answering")],
    }
    assert set(said(messages.Stats("{}"))) == {0}


def test_ids_of_a_new_life_are_above_those_of_the_last() -> None:
    info = messages.ReplicaInfo(1, 2, 3)
    first, second = next(info.ids(2)), next(info.ids(2, 1))
    assert first < second and info.frontend_of(first) == info.frontend_of(second) == 2
    assert first % 2 == second % 2 == 1


def test_counters_of_ended_processes_stay() -> None:
    def counted(number: int) -> FrontendMetrics:
        data = RequestMetrics()
        data.submitted(1, 10, True)
        data.counts.generation_tokens, data.counts.reasons["stop"] = number, number
        data.counts.latency.observe(number)
        return FrontendMetrics(1, [data], {("GET", "/", "200"): number}, {"schema": number})

    whole = counted(3).ended(counted(4).ended(None))
    (data,) = whole.request_metrics
    assert (data.counts.generation_tokens, data.counts.reasons["stop"], data.open) == (7, 7, {})
    assert (whole.http, whole.warnings) == ({("GET", "/", "200"): 7}, {"schema": 7})


def test_when_to_ask_again_is_by_the_answers_of_all() -> None:
    service = Service(create_replicas(EngineConfig("demo"), frontends=3), ServerConfig())
    now = time.monotonic()
    service._finish_times.extend(now - 20 + each for each in range(21))
    assert service._retry_after(30) == 10, "three of them give an answer a second each"


def test_request_metrics_survive_encoding() -> None:
    request_metrics = RequestMetrics()
    request_metrics.submitted(3, num_prompt=10, streaming=True)
    request_metrics.response_received(3, 1, None)
    message = FrontendMetrics(1, [request_metrics], Counter({("GET", "/live", "200"): 2}), Counter(unknown_field=3))
    decoded = decode_from_frontend(messages.encode(message))
    (told,) = decoded.request_metrics
    assert (decoded.http, decoded.warnings) == (message.http, message.warnings)
    assert told.history == request_metrics.history
    assert told.counts.generation_tokens == 1 and told.open[3].state == "answering"
    assert told.counts.first_token.count == 1


def test_default_number_of_frontends(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, count in ((1, 1), (2, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert num_http_processes(None) == count and num_http_processes(3) == 3
    monkeypatch.setattr("sys.platform", "darwin")
    assert num_http_processes(None) == 1
    with pytest.raises(ValueError, match="api_server_count=3 is supported on Linux only"):
        num_http_processes(3)
    with pytest.raises(ValueError, match="api_server_count=0 must be from 1 to 64"):
        check_server(EngineConfig("demo"), ServerConfig(api_server_count=0))
