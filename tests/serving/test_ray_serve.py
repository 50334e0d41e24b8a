"""Two replicas behind Ray Serve on this machine, over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.metrics.test_metrics import values_of
from tests.serving.running import (
    ENGINE_NAME,
    SHORTER,
    children,
    finish_reason,
    free_port,
    read_while_killed,
    wait_until,
)

serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

NAME = f"torchweave-{os.getpid()}"
QUICK: dict[str, Any] = {
    "device": "cpu", "cpu_kv_cache_gib": 0.02,
    "torch_compile_config": {"enable_fullgraph": False, "enable_inductor": False, "enable_piecewise_cuda_graph": False},
    "cuda_graph_config": {"max_batch_size": -1, "capture_mixed": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A client of two replicas of the built-in model."""
    import ray

    from torchweave.serving.ray_serve import app

    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=6, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app("demo", num_replicas=2, drain_timeout=120.0, **QUICK), name=NAME)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        serve.shutdown()
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def engines() -> list[int]:
    """The engine processes of the replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_replica = path.read_bytes().startswith(f"ray::ServeReplica:{NAME}".encode())
        except OSError:
            continue
        if is_replica:
            found += children(int(path.parent.name), ENGINE_NAME)
    return found


def streams(client: openai.OpenAI, count: int) -> list[Any]:
    """Long answers that have begun."""
    found = [iter(client.completions.create(model="demo", prompt="1+1=", stream=True, **SHORTER)) for _ in range(count)]
    for stream in found:
        next(stream)
    return found


def streams_of_both(client: openai.OpenAI) -> list[Any]:
    """Long answers that have begun, usually of both replicas: Ray's router sends a few in a row to one of them."""
    found = streams(client, 4)
    while len(found) < 12 and 0 in metric_values(client, "num_requests_running"):
        found += streams(client, 2)
    return found


def chat(client: openai.OpenAI, text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    chunks = client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def metric_values(client: openai.OpenAI, metric: str) -> set[float]:
    """Values of a metric at the replicas, asked for often enough to hear of each."""
    texts = [client.get("../metrics", cast_to=str) for _ in range(20)]
    return {values_of(text)[metric, ()] for text in texts}


def generated(client: openai.OpenAI) -> set[float]:
    """Numbers of tokens that the replicas have generated."""
    return metric_values(client, "generation_tokens_total")


@pytest.mark.whole
def test_chats_stream_and_both_replicas_work(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: chat(client, "12+30="), range(32))) == {"42"}
    assert len(engines()) == 2
    assert min(generated(client)) > 0
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="demo", prompt="a" * 2000)


@pytest.mark.whole
def test_dead_engine_is_reported_and_replaced(client: openai.OpenAI) -> None:
    for _ in range(4):  # once more where all streams were at one replica
        running, before = streams_of_both(client), engines()
        ends = read_while_killed(running, before[0])
        errors = [(why, seconds) for why, seconds in ends if seconds]
        assert all(why == "The engine process ended unexpectedly." and seconds < 60 for why, seconds in errors)
        assert all(why == "length" for why, seconds in ends if not seconds), "the streams of the other are whole"
        assert chat(client.with_options(max_retries=5), "12+30=") == "42"
        # The router knows of a new replica some time after its engine has begun.
        assert wait_until(lambda: before[0] not in engines() and len(generated(client)) == 2)  # noqa: B023
        assert chat(client.with_options(max_retries=5), "20+22=") == "42"
        if 0 < len(errors) < len(ends):
            return
    pytest.fail(f"no round had streams of both replicas: {ends}")


@pytest.mark.whole
def test_removed_replica_finishes_its_requests(client: openai.OpenAI) -> None:
    """The last test of this application."""
    running = streams(client, 4)
    with ThreadPoolExecutor(5) as pool:
        deleted = pool.submit(serve.delete, NAME)
        assert set(pool.map(finish_reason, running)) == {"length"}
        deleted.result()
    assert engines() == []


def test_impossible_profile_options_are_refused() -> None:
    from torchweave.serving.ray_serve import app

    for options, sentence in (
        ({"port": 80}, "port has no effect with Ray Serve"),
        ({"data_parallel_size": 2}, "with num_replicas"),
        ({"executor": "ray"}, "executor='ray' is not supported with Ray Serve"),
        ({"device": "cuda:1"}, "which assigns the GPUs"),
        ({"max_batch_sise": 2}, "did you mean max_batch_size"),
        ({"max_batch_size": 0}, "must be at least 1"),
        ({"drain_timeout": -1}, "drain_timeout=-1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            app("demo", **options)
    deployment = app("demo", tensor_parallel_size=4, max_batch_size=8, drain_timeout=5.0)._bound_deployment
    assert deployment.ray_actor_options == {"num_cpus": 5, "num_gpus": 4}
    assert deployment.max_ongoing_requests == 1024 + 8
