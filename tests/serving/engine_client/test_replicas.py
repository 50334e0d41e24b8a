"""Two replicas behind one server with two HTTP processes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.serving.metrics.test_metrics import Values, values_of
from tests.serving.running import SHORTER, ServerProcess, finish_reason, read_while_killed, serving, wait_until
from tests.serving.watched import STATS, asking, record_some_requests, watched_replicas
from torchweave.config.options import EngineConfig, ServerConfig, TorchCompileConfig
from torchweave.config.validate import check_server
from torchweave.engine.request import NO_TOKENS, InferenceRequest, Output, Response
from torchweave.engine.startup.open import replica_config
from torchweave.serving.engine_client.client import FrontendContext
from torchweave.serving.engine_client.engine_supervisor import EngineSupervisor, create_replicas
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.engine_client.request_stream import EngineUnavailable, RequestStream
from torchweave.serving.frontends.process import SharedEngineClient
from torchweave.serving.ipc import messages
from torchweave.serving.ipc.messages import EngineStateChanged, ReplicaInfo

PROMPTS = [f"{left}+{right}=" for left in (11, 12, 13, 14) for right in range(20, 28)]


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerProcess]:
    with serving("--dp", "2", "--api_server_count", "2", "--restart_engine", "--max_batch_size", "16") as running:
        yield running


def engines(running: ServerProcess) -> list[int]:
    """The engine processes, the oldest first."""
    return running.pids("tw-engine-")


def metrics(running: ServerProcess) -> Values:
    return values_of(running.get("/metrics").text)


def by_replica(values: Values, name: str) -> list[float]:
    return [values[name, (("replica", number),)] for number in ("0", "1")]


def answer(running: ServerProcess, prompt: Any, **options: Any) -> str:
    options = {"max_tokens": 8, "temperature": 0} | options
    return running.client().completions.create(model="demo", prompt=prompt, **options).choices[0].text


def test_both_replicas_serve_the_same_outputs(server: ServerProcess, pair: ServerProcess) -> None:
    before = metrics(pair)
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda prompt: answer(pair, prompt), PROMPTS))
    assert found == [answer(server, prompt) for prompt in PROMPTS] and len(set(found)) > 8
    after = metrics(pair)
    name = "e2e_request_latency_seconds_count"
    shares = [new - old for new, old in zip(by_replica(after, name), by_replica(before, name), strict=True)]
    assert sum(shares) == 32 and max(shares) <= 0.7 * 32, shares
    guided = {"guided_regex": "[0-9]{2}"}
    several = pair.client().completions.create(model="demo", prompt=["1+1=", "2+2="], n=2, seed=3, extra_body=guided)
    alone = server.client().completions.create(model="demo", prompt=["1+1=", "2+2="], n=2, seed=3, extra_body=guided)
    assert [each.text for each in several.choices] == [each.text for each in alone.choices]


def test_conversation_is_routed_to_its_cached_prefix(pair: ServerProcess) -> None:
    before = metrics(pair)
    conversations = [[number + 5] * 200 for number in range(6)]
    for turn in range(4):
        for tokens in conversations:
            tokens += [turn + 3] * 20
            answer(pair, tokens, max_tokens=1)
    after = metrics(pair)

    def new(name: str) -> list[float]:
        return [late - early for late, early in zip(by_replica(after, name), by_replica(before, name), strict=True)]

    assert min(new("request_prompt_tokens_count")) == 12, "three of the six at each of them"
    hits = sum(new("prefix_cache_hits_total")) / sum(new("prefix_cache_queries_total"))
    assert hits > 0.65, "all but the first turns find what came before; half of them would by chance"


def test_metrics_add_up(pair: ServerProcess) -> None:
    found = metrics(pair)
    live = pair.get("/live").json()
    assert sum(by_replica(found, "generation_tokens_total")) == live["tokens"]["generated"] > 0
    assert sum(by_replica(found, "kv_cache_blocks")) == live["blocks"]["total"]
    posts = found["http_requests_total", (("method", "POST"), ("path", "/v1/completions"), ("status", "200"))]
    answers = sum(by_replica(found, "e2e_request_latency_seconds_count"))
    assert answers == posts + 3 == sum(live["requests"]["ended"].values()), "one of the requests had four answers"
    assert by_replica(found, "engine_up") == [1, 1]
    records = pair.get("/statistics").json()["replicas"]
    assert [record["Max KV cache blocks"] for record in records] == by_replica(found, "kv_cache_blocks")
    assert [each["state"] for each in live["replicas"]] == ["ready"] * 2 and live["model"]["max_batch_size"] == 32


def test_dead_replica_fails_only_its_requests_and_restarts(pair: ServerProcess) -> None:
    client = pair.client()
    streams = [iter(client.completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER)) for _ in range(4)]
    for stream in streams:
        next(stream)
    victim = engines(pair)[0]
    ends = read_while_killed(streams, victim)
    assert answer(pair, "12+30=") == "42", "the other one goes on"
    told = Counter(why for why, _ in ends)
    assert told["The engine process ended unexpectedly."] == 2 and len(told) > 1, ends
    assert max(seconds for _, seconds in ends) < 60
    assert all(why == "length" for why, seconds in ends if not seconds), "the streams of the other are whole"
    health = pair.get("/health")
    assert health.status_code == 200
    body = health.json()
    assert body["status"] == "degraded" and body["engine"] == "ready"
    assert sorted(each["engine"] for each in body["replicas"]) == ["ready", "starting"]
    assert pair.get("/ready").status_code == 200 and sum(by_replica(metrics(pair), "engine_up")) == 1
    assert wait_until(lambda: pair.get("/health").json()["status"] == "ok")
    assert victim not in engines(pair) and len(engines(pair)) == 2
    before = by_replica(metrics(pair), "generation_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda prompt: answer(pair, prompt), PROMPTS[:8]))) == 8
    assert all(new > old for new, old in zip(by_replica(metrics(pair), "generation_tokens_total"), before, strict=True))


def test_sigterm_drains_all_replicas(pair: ServerProcess) -> None:
    """The last test of this server."""
    client, pids = pair.client(), engines(pair)
    streams = [iter(client.completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER)) for _ in range(4)]
    for stream in streams:
        next(stream)
    pair.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: pair.get("/ready").status_code == 503)
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        client.completions.create(model="demo", prompt="1+1=")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(finish_reason, streams)) == {"length"}
    assert pair.process.wait(240) == 0
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# -- several engines that are only looked at ---------------------------------------------------------------------------


def ask(app: Any, *paths: str) -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        async with asking(app) as http:
            return [await http.get(path) for path in paths]

    return asyncio.run(all_of_them())


async def opened(replicas: Any, engines: Any) -> None:
    for engine in engines:
        engine.state = "ready"
    await replicas.wait_until_ready()


def test_replicas_are_ready_when_all_are_and_failed_when_one_is() -> None:
    app, (first, second), _ = watched_replicas(2)
    replicas = app.state.service.client
    for states, state in (
        (("ready", "starting"), "starting"),
        (("failed", "ready"), "failed"),
        (("stopped",) * 2, "stopped"),
    ):
        first.state, second.state = states
        assert replicas.state == state, "until all were ready none is"
    asyncio.run(opened(replicas, (first, second)))
    second.state, second.failure = "failed", "It is gone."
    assert replicas.state == "ready" and replicas.failure == "Replica 1: It is gone."
    (health,) = ask(app, "/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded"
    assert health.json()["replicas"][1] == {"replica": 1, "engine": "failed", "restarts": 0, "reason": "It is gone."}
    first.state, first.failure = "failed", "It is gone."
    (health,) = ask(app, "/health")
    assert health.status_code == 503 and health.json()["status"] == "failed" and not replicas.alive
    assert health.json()["reason"] == "It is gone."
    first.state = "stopped"
    assert replicas.state == "stopped", "a signal ended the server, whatever was lost before"


def test_in_a_later_http_process_a_failed_replica_is_no_failure_of_the_start() -> None:
    context = FrontendContext(frontend=1, life=1)
    engines = [SharedEngineClient(ReplicaInfo(index, 2, 2), context) for index in range(2)]
    replicas = Replicas(EngineConfig("demo"), engines, context, opened=True)
    engines[0].on_engine_message(EngineStateChanged(0, "ready", "", 0, None))  # read before the application starts
    engines[1].on_engine_message(EngineStateChanged(1, "failed", "It is gone.", 0, None))
    asyncio.run(replicas.start())
    asyncio.run(asyncio.wait_for(replicas.wait_until_ready(), 30))
    assert replicas.state == "ready"


def test_the_requests_of_an_ended_http_process_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = create_replicas(EngineConfig("demo"), count=2, frontends=3)
    first, sent = replicas.engines[0], list[Any]()
    first._frontend_context.shared_load.write(0, 2, 5, 700)
    for engine in replicas.engines:
        monkeypatch.setattr(engine, "_send_bytes", lambda message: sent.append(messages.decode_to_engine(message)))
    known = replicas.replace_frontend(2, 1)
    assert [each.engine for each in known] == [0, 1] and first.num_in_flight == first.pending_prefill_tokens == 0
    assert all(
        each.frontend == 2 and each.before == next(ReplicaInfo(number, 2, 3).ids(2, 1))
        for number, each in enumerate(sent)
    )
    assert len(sent) == 2


def handed_in(replicas: Replicas) -> list[int]:
    """A request at each of the engines."""
    request = InferenceRequest(0, np.array([1]), streaming=True)
    return [each.submit(RequestStream(replicas), request) for each in replicas.engines]


def test_tokens_flow_as_long_as_somebody_waits_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, flow = create_replicas(EngineConfig("demo"), count=2), list[bool]()
    monkeypatch.setattr(replicas.admission_pacer, "on_step_tokens", lambda more: flow.append(more))
    for engine in replicas.engines:
        engine.state = "ready"
        monkeypatch.setattr(engine, "_send_bytes", lambda _: None)
    requests = handed_in(replicas)
    assert replicas.num_in_flight == 2
    for engine, request in zip(replicas.engines, requests, strict=True):
        engine._on_message(messages.Outputs(b"", b"", [Response(request, Output(NO_TOKENS, "length"), True)]))
    assert flow == [True, False] and replicas.num_in_flight == 0


def test_what_cannot_be_handed_to_an_engine_is_not_waited_for() -> None:
    replicas = create_replicas(EngineConfig("demo"), count=2)
    for engine in replicas.engines:
        engine.state = "ready"
    with pytest.raises(EngineUnavailable):
        handed_in(replicas)
    assert replicas.num_in_flight == 0 and not replicas.engines[0].request_metrics.open


def test_the_page_sums_what_the_metrics_label() -> None:
    app, clients, clock = watched_replicas(2)
    for client in clients:
        client.state, client.stats = "ready", STATS
    record_some_requests(clients[0].request_metrics, clock)
    record_some_requests(clients[1].request_metrics, clock)
    clients[1].request_metrics.submitted(5, num_prompt=7, streaming=True)
    clock.now += 1
    scraped, live = ask(app, "/metrics", "/live")
    found, shown = values_of(scraped.text), live.json()
    assert by_replica(found, "generation_tokens_total") == [13, 13] and shown["tokens"] == {"read": 60, "generated": 26}
    assert by_replica(found, "iteration_seconds_count") == [3, 3] and shown["steps"] == {
        "count": 6,
        "p50_ms": 3.0,
        "p99_ms": 4.0,
    }
    assert shown["requests"]["running"] == 6 and shown["requests"]["open"] == 3 and shown["requests"]["refused"] == 2
    assert shown["blocks"] == {"total": 200, "used": 50, "tokens_per_block": 16, "hit_rate": 0.75}
    assert shown["history"]["generated"][-1] == 12 and shown["history"]["step_p99_ms"][-1] == 4.0
    assert [each["open"] for each in shown["replicas"]] == [1, 2]
    assert [each["id"] for each in shown["recent"]][:3] == [4, 4, 5], "of both replicas: paused, then waiting"
    labels = {key for (name, pairs) in found for key, _ in pairs if not name.startswith(("http", "build"))}
    assert labels == {"replica", "le", "finished_reason"}


def test_a_dead_engine_keeps_its_counters_and_clears_its_gauges() -> None:
    app, engines, _ = watched_replicas(2)
    for engine in engines:
        engine.state = "ready"
        engine._on_message(messages.Stats(json.dumps(STATS), []))
    cast(EngineSupervisor, engines[0])._on_process_exit()
    found = values_of(ask(app, "/metrics")[0].text)
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_paused", "kv_cache_usage_perc"):
        dead, alive = by_replica(found, name)
        assert dead == 0 < alive, name
    assert by_replica(found, "prefix_cache_hits_total") == [480, 480]


def test_each_replica_has_its_own_gpus_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        "demo", seed=7, tensor_parallel_size=2, torch_compile_config=TorchCompileConfig(dump_dir="here")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = [replica_config(config, index, 4) for index in range(4)]
    assert [each.device for each in found] == ["cuda:0", "cuda:2", "cuda:4", "cuda:6"]
    assert [each.seed for each in found] == [7, 8, 9, 10]
    assert [each.torch_compile_config.dump_dir for each in found] == ["here", None, None, None]
    assert replica_config(replace(config, device="cuda:4"), 1, 2).device == "cuda:6"
    with pytest.raises(
        ValueError, match="=3 with tensor_parallel_size=2 needs 6 GPUs, but from cuda:4 on this machine has 4"
    ):
        replica_config(replace(config, device="cuda:4"), 0, 3)


def test_impossible_profile_options_are_refused() -> None:
    with pytest.raises(ValueError, match="data_parallel_size=0 must be at least 1"):
        check_server(EngineConfig("demo"), ServerConfig(data_parallel_size=0))
    with pytest.raises(ValueError, match="is not supported with executor=ray"):
        check_server(EngineConfig("demo", tensor_parallel_size=2, executor="ray"), ServerConfig(data_parallel_size=2))
