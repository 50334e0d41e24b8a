"""`bench serve` against a server with known latencies, compared with the openai client."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.openai_server import FakeServer, serving
from torchweave.bench.serving.figures import figures, itl_outside_slow_periods
from torchweave.bench.serving.request import RequestStats
from torchweave.bench.serving.stalls import SlowPeriod, StallMonitor, find_slow_periods, summary
from torchweave.bench.serving.workload import Lengths, Vocabulary, arrivals, prompts
from torchweave.cli.main import main

# What `vllm bench serve --save-result` writes of a run with requests that generate text, each key.
VLLM_KEYS = {
    "endpoint_type", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "completed",
    "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{part}_{name}_ms" for part in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
VLLM_DETAILS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts", "errors",
}  # fmt: skip
_SLACK = 5.0  # seconds that a busy machine may add


def bench(server: FakeServer, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    argv = ["bench", "serve", "--base_url", server.url, "--json", "--quiet", "--input_len", "16", *options]
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def test_metrics_equal_the_server_latencies(capsys: pytest.CaptureFixture[str]):
    with serving(FakeServer(first=0.06, gap=0.02)) as server:
        found = bench(
            server, capsys, "--num_prompts", "8", "--output_len", "6", "--save_detailed", "--goodput", "e2el:9000"
        )
    assert set(found) >= VLLM_KEYS | VLLM_DETAILS
    assert found["completed"] == 8 and found["failed"] == 0
    assert found["total_input_tokens"] == 8 * 16 and found["total_output_tokens"] == 8 * 6
    assert 60 <= found["median_ttft_ms"] < 60 + 1e3 * _SLACK
    assert 15 < found["median_itl_ms"] < 25 + 1e3 * _SLACK and 15 < found["mean_tpot_ms"] < 25 + 1e3 * _SLACK
    assert 160 <= found["median_e2el_ms"] < 160 + 1e3 * _SLACK
    assert all(len(gaps) == 5 for gaps in found["itls"])
    for whole, first, gaps in zip(found["latencies"], found["ttfts"], found["itls"], strict=True):
        assert whole == pytest.approx(first + sum(gaps), abs=0.005)
    assert found["output_throughput"] == pytest.approx(48 / found["duration"])
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 1 < found["max_concurrent_requests"] <= 8 and 0 < found["max_output_tokens_per_s"] <= 48
    assert set(found["generated_texts"]) == {" a" * 6}
    assert set(found["machine_stalls"]) == {"longest_ms", "over_2_ms", "slow_spells", "slow_s"}


def test_metrics_equal_those_of_the_openai_client(capsys: pytest.CaptureFixture[str]):
    """Counts are equal and latencies agree within noise with what the `openai` client measures on the same server."""
    openai = pytest.importorskip("openai")
    count, length = 4, 4

    async def by_the_public_client() -> list[RequestStats]:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none")

        async def one() -> RequestStats:
            stats = RequestStats(16, start=time.perf_counter())
            stream = await client.completions.create(
                model="fake", prompt=[1] * 16, max_tokens=length, stream=True, stream_options={"include_usage": True}
            )
            times = []
            async for chunk in stream:
                if chunk.choices:
                    times.append(time.perf_counter() - stats.start)
                elif chunk.usage is not None:
                    stats.output_tokens = chunk.usage.completion_tokens
            stats.ttft, stats.latency, stats.itl = times[0], times[-1], np.diff(times).tolist()
            return stats

        await one()  # connects
        return list(await asyncio.gather(*(one() for _ in range(count))))

    def agree(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
        assert ours["total_output_tokens"] == theirs["total_output_tokens"] == count * length
        within = (("ttft", 400), ("itl", 120), ("tpot", 120), ("e2el", 500))  # below a gap of the server
        return all(abs(ours[f"median_{name}_ms"] - theirs[f"median_{name}_ms"]) < most for name, most in within)

    with serving(FakeServer(first=1.0, gap=0.3)) as server:
        for _ in range(5):  # a busy machine holds one of them up; another meaning of a word would show every time
            ours = bench(server, capsys, "--num_prompts", str(count), "--output_len", str(length))
            theirs = figures(asyncio.run(by_the_public_client()), 1.0, (99,), {})
            if agree(ours, theirs):
                return
    pytest.fail(f"{ours}\n{theirs}")


def test_failed_requests_are_counted_and_named(capsys: pytest.CaptureFixture[str]):
    with serving(FakeServer(first=0.0, gap=0.001, refuse=frozenset({2}), cut=frozenset({4, 5}))) as server:
        found = bench(server, capsys, "--num_prompts", "6", "--output_len", "8", "--max_concurrency", "1")
        assert found["completed"] == 3 and found["failed"] == 3
        assert "too many requests" in found["errors"][0] and "closed the connection" in found["errors"][1]
        assert found["total_output_tokens"] == 24
        assert (
            main(["bench", "serve", "--base_url", server.url, "--quiet", "--num_prompts", "2", "--output_len", "2"])
            == 0
        )
    assert "none failed" in capsys.readouterr().out


def test_max_concurrency_limits_open_requests(capsys: pytest.CaptureFixture[str]):
    with serving(FakeServer(first=0.02, gap=0.005)) as server:
        options = ("--num_prompts", "9", "--output_len", "4", "--max_concurrency", "3", "--save_detailed")
        found = bench(server, capsys, *options)
        assert server.most_open == 3 and found["max_concurrent_requests"] <= 3
        assert server.num_connections <= 4  # connections are used again
    assert sorted(found["queue_times"])[2] < 0.02 < max(found["queue_times"])


def test_chat_endpoint_and_extra_body(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(FakeServer(first=0.0, gap=0.001)) as server:
        options = ("--endpoint", "/v1/chat/completions", "--num_prompts", "2", "--output_len", "3", "--ignore_eos")
        found = bench(server, capsys, *options, "--extra_body", '{"top_k": 5}', "--base_url", server.url + "/v1/")
    body = server.bodies[-1]
    assert body["top_k"] == 5 and body["ignore_eos"] is True and body["max_completion_tokens"] == 3
    assert body["messages"][0]["role"] == "user" and found["endpoint_type"] == "openai-chat"
    assert "Authorization: Bearer secret" in server.headers[-1] and "secret" not in json.dumps(found)
    assert found["exact_prompts"] is False and found["completed"] == 2


def test_server_without_tokenize_endpoint_gets_text_prompts(capsys: pytest.CaptureFixture[str]):
    with serving(FakeServer(first=0.0, gap=0.001, with_tokenize=False)) as server:
        found = bench(server, capsys, "--num_prompts", "2", "--output_len", "2")
    assert isinstance(server.bodies[-1]["prompt"], str) and found["exact_prompts"] is False
    assert found["total_input_tokens"] == 32  # as the server counts


def test_prompts_share_exactly_prefix_len_tokens():
    lengths = Lengths(input_len=40, output_len=20, range_ratio=0.5, prefix_len=16)
    vocabulary = Vocabulary("/v1/completions", range(50, 90))
    work = prompts(lengths, 200, 7, vocabulary, {"stream": True})
    bodies = [json.loads(prompt.body) for prompt in work]
    assert len({tuple(body["prompt"][:16]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][16:32]) for body in bodies}) == 200
    sizes = [len(body["prompt"]) for body in bodies]
    assert min(sizes) >= 16 + 20 and max(sizes) <= 16 + 60 and len(set(sizes)) > 20
    assert sizes == [prompt.input_tokens for prompt in work]
    assert all(10 <= body["max_tokens"] <= 30 for body in bodies)
    assert [prompt.body for prompt in prompts(lengths, 200, 7, vocabulary, {"stream": True})] == [p.body for p in work]
    assert prompts(lengths, 1, 8, vocabulary, {})[0].body != work[0].body


def test_arrivals_follow_request_rate_and_burstiness():
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0] * 3
    for burstiness, spread in ((1.0, 1.0), (0.25, 2.0), (16.0, 0.25)):
        times = arrivals(4000, 10.0, burstiness, 1)
        gaps = np.diff([0.0, *times])
        assert times[-1] == pytest.approx(400) and (gaps >= 0).all()
        assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.1)
    assert arrivals(4, 2.0, float("inf"), 0) == [0.5, 1.0, 1.5, 2.0]


def test_requests_are_sent_at_the_request_rate(capsys: pytest.CaptureFixture[str]):
    with serving(FakeServer(first=0.0, gap=0.001)) as server:
        options = ("--num_prompts", "30", "--output_len", "2", "--request_rate", "15", "--save_detailed")
        found = bench(server, capsys, *options)
    planned = np.asarray(arrivals(30, 15.0, 1.0, 0))
    late = np.asarray(found["start_times"]) - found["start_times"][0] - (planned - planned[0])
    assert late.min() > -1 and np.median(late) < 1, "of two seconds"


def test_machine_stalls_are_detected():
    with StallMonitor() as machine:
        assert machine._process is not None
        machine._process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        machine._process.send_signal(signal.SIGCONT)
    assert machine.stats["longest_ms"] > 40 and machine.stats["over_2_ms"] >= 1
    found = summary([0.0011, 0.003, 0.0052], [SlowPeriod(1.0, 1.25), SlowPeriod(2.0, 2.5)])
    assert found == {"longest_ms": 5.2, "over_2_ms": 2, "slow_spells": 2, "slow_s": 0.75}
    assert summary([]) == {"longest_ms": 0.0, "over_2_ms": 0, "slow_spells": 0, "slow_s": 0}


def test_slow_periods_are_detected():
    """Slow sums close together make one spell; a single one makes none, nor does twice the usual time."""
    slow = {50: 5.0, 55: 4.0, 60: 3.5, 200: 9.0, 300: 2.0, 301: 2.0, 400: 4.0, 401: 4.0}
    sums = [(0.004 * at, 1e-4 * slow.get(at, 1.0)) for at in range(500)]
    slow_periods = find_slow_periods(sums)
    assert slow_periods == [pytest.approx((0.18, 0.26)), pytest.approx((1.58, 1.624))]
    assert find_slow_periods([]) == []

    # Tokens each 10 ms from 0.1 to 2.1 s; those late that come in a spell, and one that spans the second from end to end.
    times = [0.1 + 0.01 * at for at in range(200) if not 1.5 < 0.1 + 0.01 * at < 1.7]
    stats = RequestStats(4, start=0.05, ttft=0.05, latency=2.0, itl=np.diff(times).tolist(), output_tokens=len(times))
    found = itl_outside_slow_periods([stats, RequestStats(4, error="cut", itl=[5.0])], slow_periods, (100,))
    assert found == {"median_itl_ms": pytest.approx(10), "p100_itl_ms": pytest.approx(10)}
    assert max(stats.itl) > 0.19 and itl_outside_slow_periods([stats], [], (99,)) == {} == itl_outside_slow_periods(
        [], slow_periods, (99,)
    )


def test_stalls_are_omitted_when_the_monitor_process_died():
    with StallMonitor() as machine:
        assert machine._process is not None
        machine._process.kill()
    assert machine.stats == {}


def test_goodput_with_single_token_outputs():
    stats = [RequestStats(4, start=at, ttft=0.1, latency=0.1 + 0.01 * (n - 1), itl=[0.01] * (n - 1), output_tokens=n) for at, n in
            ((0.0, 1), (0.0, 11), (5.0, 101))]  # fmt: skip
    found = figures(stats, 10.0, (50,), {"ttft": 150, "e2el": 250})
    assert found["request_goodput"] == pytest.approx(0.2)
    assert found["mean_tpot_ms"] == pytest.approx(10) and found["p50_itl_ms"] == pytest.approx(10)
    assert found["max_concurrent_requests"] == 2
    assert found["median_e2el_ms"] == pytest.approx(1e3 * statistics.median(each.latency for each in stats))
    assert figures([], 1.0, (99,), {"ttft": 1})["completed"] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--goodput", "speed:3"], "NAME:MILLISECONDS"),
        (["--request_rate", "0"], "request_rate=0.0 is not valid"),
        (["--extra_body", "[1]"], "takes an object"),
        (["--range_ratio", "1"], "range_ratio"),
        (["--input_len", "0"], "input_len=0 is too small"),
        (["--base_url", "127.0.0.1:1"], "base_url"),
        (["--base_url", "http://127.0.0.1:1", "--ready_check_timeout_sec", "0"], "no ready server"),
    ],
)
def test_invalid_options_give_one_line_errors(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--quiet", "--num_prompts", "1", *options]) == 2
    assert expected in capsys.readouterr().err


def test_waiting_for_a_server_is_reported(capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "serve", "--quiet", "--base_url", "http://127.0.0.1:1", "--ready_check_timeout_sec", "1.2"]
    assert main(argv) == 2
    waiting, refused = capsys.readouterr().err.splitlines()
    assert waiting.startswith("Waiting for a server at http://127.0.0.1:1 (") and "at most 1.2 s" in waiting
    assert "no ready server" in refused


def test_missing_api_key_error_names_the_environment_variable(capsys: pytest.CaptureFixture[str]):
    with serving(FakeServer(locked=True)) as server:
        assert main(["bench", "serve", "--quiet", "--base_url", server.url]) == 2
    sentence = f"{server.url} requires an API key; set OPENAI_API_KEY\n"
    assert capsys.readouterr().err == f"torchweave: {sentence}"


def test_output_writes_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "served.json"
    with serving(FakeServer(first=0.0, gap=0.001)) as server:
        bench(server, capsys, "--num_prompts", "2", "--output_len", "3", "--output", str(path))
    assert json.loads(path.read_text())["completed"] == 2
    table = path.with_suffix(".md").read_text()
    assert "| time to first token |" in table and "p99" in table
