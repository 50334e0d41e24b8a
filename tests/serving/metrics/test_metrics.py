"""`/metrics` read by Prometheus' parser and compared with known traffic."""

from __future__ import annotations

import asyncio

import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as families

from tests.serving.running import ServerProcess, wait_until
from tests.serving.watched import STATS, asking, record_some_requests, watched
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.serving.engine_client.counters import FIRST_TOKEN_SECONDS
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.http.app import create_app

# What vLLM calls them (docs.vllm.ai, "Production Metrics"), under our prefix.
OF_VLLM = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter", "prefix_cache_hits": "counter", "prompt_tokens": "counter",
    "generation_tokens": "counter", "request_success": "counter", "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram", "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram", "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram", "iteration_tokens": "histogram", "time_per_output_token_seconds": "histogram",
}  # fmt: skip
OURS = {
    "num_requests_paused": "gauge", "engine_up": "gauge", "build_info": "gauge", "http_requests": "counter",
    "compiles_after_ready": "counter", "iteration_seconds": "histogram", "kv_cache_blocks": "gauge",
    "engine_restarts": "counter", "iterations": "counter", "requests_refused": "counter",
    "invalid_logits": "counter", "request_warnings": "counter",
}  # fmt: skip
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values_of(text: str) -> Values:
    """Every sample by its name without prefix and its labels without the model's."""
    found = {}
    for family in families(text):
        for sample in family.samples:
            labels = tuple(sorted(pair for pair in sample.labels.items() if pair[0] != "model_name"))
            found[sample.name.removeprefix("torchweave_"), labels] = sample.value
    return found


def reasons_of(values: Values) -> dict[str, float]:
    """Answers that ended, by reason."""
    ended = ((dict(labels), value) for (name, labels), value in values.items() if name == "request_success_total")
    return {labels["finished_reason"]: value for labels, value in ended}


def get(path: str, app, **headers: str):
    async def ask():
        async with asking(app) as http:
            return await http.get(path, headers=headers)

    return asyncio.run(ask())


def test_metrics_have_vllms_meanings():
    app, client, clock = watched(state="ready")
    client.stats = STATS
    record_some_requests(client.request_metrics, clock)
    answer = get("/metrics", app)
    assert answer.headers["content-type"].startswith("text/plain")
    kinds = {family.name.removeprefix("torchweave_"): family.type for family in families(answer.text)}
    assert kinds == {**OF_VLLM, **OURS} and all(family.documentation for family in families(answer.text))
    of = {name: value for (name, labels), value in values_of(answer.text).items() if not labels}
    assert (of["num_requests_running"], of["num_requests_waiting"], of["num_requests_paused"]) == (3, 5, 2)
    assert of["kv_cache_usage_perc"] == 0.25 and of["engine_up"] == 1
    assert (of["prefix_cache_queries_total"], of["prefix_cache_hits_total"]) == (640, 480)
    assert of["prompt_tokens_total"] == 10 + 20 and of["generation_tokens_total"] == 5 + 8
    assert of["requests_refused_total"] == 1
    assert of["time_to_first_token_seconds_count"] == 2
    assert of["time_to_first_token_seconds_sum"] == pytest.approx(
        0.05 + 0.09
    )  # of the whole one, when the engine drew it
    assert of["inter_token_latency_seconds_count"] == 3
    assert of["inter_token_latency_seconds_sum"] == pytest.approx(0.05)
    assert of["time_per_output_token_seconds_sum"] == pytest.approx(0.05 / 4 + 0.01 / 7)
    assert of["request_queue_time_seconds_count"] == 3
    assert of["request_queue_time_seconds_sum"] == pytest.approx(0.03 + 0.03 + 0.10)
    assert of["e2e_request_latency_seconds_count"] == 3 and of["request_prompt_tokens_sum"] == 60
    assert of["request_generation_tokens_sum"] == 13
    assert of["iteration_tokens_count"] == 3 and of["iteration_tokens_sum"] == 66
    assert of["iteration_seconds_sum"] == pytest.approx(0.009)


def test_speculation_has_vllms_counters():
    app, client, _ = watched(state="ready")
    counts = {"num_drafts": 5, "num_draft_tokens": 14, "num_accepted_tokens": 9, "num_accepted_tokens_per_pos": [5, 4]}
    client.stats = STATS | {"spec_decode": counts}
    found = values_of(get("/metrics", app).text)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert found[f"spec_decode_{name}_total", ()] == counts[name]
    by_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[by_position, (("position", str(position)),)] for position in range(2)] == [5, 4]


def test_reasons_and_buckets():
    app, client, clock = watched()
    record_some_requests(client.request_metrics, clock)
    found = values_of(get("/metrics", app).text)
    assert reasons_of(found) == {"stop": 1, "length": 1, "cancelled": 1, "error": 0}
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in found.items()
        if name == "time_to_first_token_seconds_bucket"
    }
    assert list(map(float, buckets)) == [*FIRST_TOKEN_SECONDS, float("inf")]
    assert buckets["0.04"] == 0 and buckets["0.06"] == 1 and buckets["+Inf"] == 2


def test_an_answer_that_a_stop_string_ended_counts_as_stop():
    """The engine sees no text, so it reports its own finish reason."""
    _, client, _ = watched()
    request_metrics, told = client.request_metrics, ("cancelled", "length", "error", "cancelled")
    for number in range(4):
        request_metrics.submitted(number, num_prompt=5, streaming=True)
    request_metrics.stopped_by_string([0, 1, 2, 9])
    for number, reason in enumerate(told):
        request_metrics.response_received(number, 1, reason)
    assert request_metrics.counts.reasons == {"stop": 2, "length": 0, "cancelled": 1, "error": 1}
    assert [record.reason for record in request_metrics.recent] == ["cancelled", "error", "stop", "stop"]


def test_http_requests_are_counted_by_route_and_status():
    app, _, _ = watched()
    for path in ("/metrics", "/health", "/v1/models/demo", "/v1/models/other", "/nowhere/1", "/nowhere/2"):
        get(path, app)
    found = values_of(get("/metrics", app).text)
    http = {
        tuple(dict(labels).values()): value for (name, labels), value in found.items() if name == "http_requests_total"
    }
    assert http == {
        ("GET", "/metrics", "200"): 1, ("GET", "/health", "503"): 1, ("GET", "/v1/models/{name:path}", "503"): 1,
        ("GET", "/v1/models/{name:path}", "404"): 1, ("GET", "other", "404"): 2,
    }  # fmt: skip


def test_requests_refused_by_middleware_are_counted_by_route():
    settings = ServerConfig(api_key=("sesame",), max_body_bytes=10)
    app = create_app(create_replicas(EngineConfig(model="demo")), settings)
    for path in ("/metrics", "/v1/models/demo", "/tokenize", "/nowhere/1", "/nowhere/2", "/docs"):
        get(path, app)

    async def send_much():
        async with asking(app) as http:
            return await http.post("/v1/completions", content="a" * 11, headers={"Authorization": "Bearer sesame"})

    assert asyncio.run(send_much()).status_code == 413
    assert app.state.http.all_requests == {
        ("GET", "/metrics", "401"): 1, ("GET", "/v1/models/{name:path}", "401"): 1, ("GET", "/tokenize", "401"): 1,
        ("GET", "other", "401"): 2, ("GET", "/docs", "200"): 1, ("POST", "/v1/completions", "413"): 1,
    }  # fmt: skip


def test_two_servers_have_separate_counters():
    (first, one, clock), (second, _, _) = watched(), watched()
    record_some_requests(one.request_metrics, clock)
    assert values_of(get("/metrics", first).text)["generation_tokens_total", ()] == 13
    assert values_of(get("/metrics", second).text)["generation_tokens_total", ()] == 0


def test_openmetrics_format():
    app, client, clock = watched()
    record_some_requests(client.request_metrics, clock)
    answer = get("/metrics", app, accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in open_metrics(answer.text)} == {
        f"torchweave_{name}" for name in {**OF_VLLM, **OURS}
    }


STOP_STRING = {"max_tokens": 400, "ignore_eos": True, "stop": ["2"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", [STOP_STRING, {"guided_regex": "[0-9]{3}"}], ids=["stop string", "form"])
def test_metrics_count_the_reasons_that_clients_are_told(server: ServerProcess, ends: dict[str, object], stream: bool):
    def ended() -> dict[str, float]:
        return reasons_of(values_of(server.get("/metrics").text))

    asked = {"prompt": "12+30=", "temperature": 0, **ends}
    before = ended()
    answers = [server.post("/v1/completions", {**asked, "stream": stream}).text for _ in range(3)]
    assert all('"finish_reason":"stop"' in text for text in answers), answers
    wait_until(lambda: sum(ended().values()) == sum(before.values()) + 3)
    assert ended() == before | {"stop": before["stop"] + 3}


def test_metrics_count_what_was_asked(server: ServerProcess):
    """Known traffic through a real server, read back from its metrics."""
    before = values_of(server.get("/metrics").text)
    client = server.client()
    for prompt in ("12+30=", "1+1=", "copy: a b"):
        client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=6)
    answer = client.completions.create(
        model="demo", prompt=[5] * 40, max_tokens=9, temperature=0, n=2, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=[5] * 4000)
    after = values_of(server.get("/metrics").text)
    live = server.get("/live").json()
    found = {key: value - before.get(key, 0) for key, value in after.items()}
    assert answer.usage is not None and answer.usage.completion_tokens == 18
    assert after["engine_up", ()] == 1
    assert found["generation_tokens_total", ()] >= 18 + 3 and found["request_generation_tokens_count", ()] == 5
    assert found["request_success_total", (("finished_reason", "length"),)] >= 2
    assert found["requests_refused_total", ()] == 1
    assert found["request_queue_time_seconds_count", ()] == found["time_to_first_token_seconds_count", ()] == 5
    assert found["request_queue_time_seconds_sum", ()] < found["time_to_first_token_seconds_sum", ()]
    assert found["time_to_first_token_seconds_sum", ()] < found["e2e_request_latency_seconds_sum", ()]
    assert found["http_requests_total", (("method", "POST"), ("path", "/v1/completions"), ("status", "200"))] == 4
    assert found["http_requests_total", (("method", "POST"), ("path", "/v1/completions"), ("status", "400"))] == 1
    assert after["num_requests_running", ()] == after["num_requests_waiting", ()] == 0
    assert found["iteration_tokens_sum", ()] >= found["generation_tokens_total", ()]
    assert live["tokens"]["generated"] == after["generation_tokens_total", ()]
    assert live["blocks"]["used"] == 0 and live["blocks"]["total"] > 0 and live["requests"]["open"] == 0
