"""Load test: wait for the server, find the model, send the requests and compute the metrics."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchweave.bench.serving.figures import details, figures, itl_outside_slow_periods
from torchweave.bench.serving.http import HttpClient
from torchweave.bench.serving.load_test import LoadTest
from torchweave.bench.serving.request import RequestStats, send_request
from torchweave.bench.serving.stalls import StallMonitor
from torchweave.bench.serving.workload import Prompt, Vocabulary, arrivals, prompts, text_ids
from torchweave.config.options import api_key_from_environment
from torchweave.utils.gc import gc_paused

Advance = Callable[..., None]
_SILENT_SECONDS = 1.0
"""A server that starts together with the benchmark may take this long without a message."""


def run(load_test: LoadTest, advance: Advance) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a load test; returns metrics and per-request data. Calls `advance` after each request.

    Raises:
        ValueError: the server does not respond, or rejects a warm-up request.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(load_test, advance))
    return uvloop.run(_run(load_test, advance))


async def _run(load_test: LoadTest, advance: Advance) -> tuple[dict[str, Any], dict[str, Any]]:
    http = HttpClient(load_test.server_url, api_key_from_environment())
    try:
        await _until_ready(http, load_test)
        model = load_test.model or await _first_model(http)
        vocabulary = Vocabulary(load_test.endpoint, await text_ids(http, model))
        fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **load_test.request_fields}
        work = prompts(
            load_test.lengths, load_test.num_prompts + max(1, load_test.num_warmups), load_test.seed, vocabulary, fields
        )
        measured, others = work[: load_test.num_prompts], work[load_test.num_prompts :]
        for prompt in others:
            stats = await send_request(http, load_test.endpoint, prompt.body, prompt.input_tokens)
            if not stats.success:
                raise ValueError(f"a warm-up request failed: {stats.error}")
        with StallMonitor() as machine, gc_paused():  # a pause here would count as a server stall
            begin = time.perf_counter()
            all_stats = await _send_all(http, load_test, measured, advance)
            duration = time.perf_counter() - begin
    finally:
        http.close()
    head = {
        "model_id": model,
        "exact_prompts": vocabulary.exact,
        "machine_stalls": machine.stats,
        "outside_slow_spells": itl_outside_slow_periods(all_stats, machine.slow_periods, load_test.metric_percentiles),
    }
    return head | figures(all_stats, duration, load_test.metric_percentiles, load_test.limits), details(all_stats)


async def _send_all(
    http: HttpClient, load_test: LoadTest, work: Sequence[Prompt], advance: Advance
) -> list[RequestStats]:
    semaphore = asyncio.Semaphore(load_test.max_concurrency or len(work))

    async def one(prompt: Prompt, arrived: float) -> RequestStats:
        async with semaphore:
            stats = await send_request(http, load_test.endpoint, prompt.body, prompt.input_tokens)
        stats.queued = stats.start - arrived
        advance()
        return stats

    begin = time.perf_counter()
    tasks = []
    for prompt, at in zip(
        work, arrivals(len(work), load_test.request_rate, load_test.burstiness, load_test.seed), strict=True
    ):
        wait = begin + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(prompt, time.perf_counter())))
    return list(await asyncio.gather(*tasks))


async def _until_ready(http: HttpClient, load_test: LoadTest) -> None:
    """Poll `/v1/models` until the server responds; say so once if that takes longer than `_SILENT_SECONDS`."""
    begin = time.monotonic()
    end, silent = begin + load_test.ready_check_timeout_sec, True
    while True:
        try:
            status, body = await http.get("/v1/models")
            failure = f"status {status}: {body[:300].decode(errors='replace')}"
            if status == 200:
                return
        except OSError as error:
            status, failure = 0, str(error)
        if status in (401, 403):  # waiting does not help
            raise ValueError(f"{load_test.server_url} requires an API key; set OPENAI_API_KEY")
        if time.monotonic() >= end:
            raise ValueError(f"no ready server at {load_test.server_url}/v1/models ({failure})")
        if silent and time.monotonic() >= begin + _SILENT_SECONDS:
            silent = False
            print(
                f"Waiting for a server at {load_test.server_url} ({failure}), at most {load_test.ready_check_timeout_sec:g} s "
                "(--ready_check_timeout_sec); Ctrl-C to stop.",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.sleep(0.5)


async def _first_model(http: HttpClient) -> str:
    _, body = await http.get("/v1/models")
    try:
        return json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ValueError("the server lists no model at /v1/models; name one with --model") from None
