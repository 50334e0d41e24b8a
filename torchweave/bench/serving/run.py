"""A run: find the model, wait until the server answers, send everything, and take the figures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchweave.bench.serving.figures import details, figures, outside
from torchweave.bench.serving.http import Http
from torchweave.bench.serving.request import Seen, ask
from torchweave.bench.serving.stalls import Watch
from torchweave.bench.serving.workload import Lengths, Prompt, Vocabulary, arrivals, prompts, text_ids
from torchweave.utils.gc import uncollected

Advance = Callable[..., None]


@dataclass(frozen=True)
class Run:
    """What is sent, how fast and to whom; the names are those of the command's options.

    Attributes:
        fields: go into every request.
        goodput: milliseconds within which a request must be by metric, to be counted as good.
    """

    base_url: str
    endpoint: str
    model: str | None
    api_key: str
    lengths: Lengths
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    ready_check_timeout_sec: float
    percentiles: tuple[float, ...]
    goodput: dict[str, float]
    fields: dict[str, Any]
    seed: int


def run(plan: Run, advance: Advance) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a run, and what was seen of each request. `advance` is called after each request.

    Raises:
        ValueError: the server does not answer, or refuses the first request.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(plan, advance))
    return uvloop.run(_run(plan, advance))


async def _run(plan: Run, advance: Advance) -> tuple[dict[str, Any], dict[str, Any]]:
    http = Http(plan.base_url, plan.api_key)
    try:
        await _until_ready(http, plan)
        model = plan.model or await _first_model(http)
        vocabulary = Vocabulary(plan.endpoint, await text_ids(http, model))
        fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **plan.fields}
        work = prompts(plan.lengths, plan.num_prompts + max(1, plan.num_warmups), plan.seed, vocabulary, fields)
        measured, others = work[: plan.num_prompts], work[plan.num_prompts :]
        for prompt in others:
            seen = await ask(http, plan.endpoint, prompt.body, prompt.input_tokens)
            if not seen.success:
                raise ValueError(f"the server does not answer as it should: {seen.error}")
        with Watch() as machine, uncollected():  # a pause here would be seen as one of the server
            begin = time.perf_counter()
            all_seen = await _send_all(http, plan, measured, advance)
            duration = time.perf_counter() - begin
    finally:
        http.close()
    head = {
        "model_id": model,
        "exact_prompts": vocabulary.exact,
        "machine_stalls": machine.seen,
        "outside_slow_spells": outside(all_seen, machine.spells, plan.percentiles),
    }
    return head | figures(all_seen, duration, plan.percentiles, plan.goodput), details(all_seen)


async def _send_all(http: Http, plan: Run, work: Sequence[Prompt], advance: Advance) -> list[Seen]:
    turns = asyncio.Semaphore(plan.max_concurrency or len(work))

    async def one(prompt: Prompt, arrived: float) -> Seen:
        async with turns:
            seen = await ask(http, plan.endpoint, prompt.body, prompt.input_tokens)
        seen.queued = seen.start - arrived
        advance()
        return seen

    begin = time.perf_counter()
    tasks = []
    for prompt, at in zip(work, arrivals(len(work), plan.request_rate, plan.burstiness, plan.seed), strict=True):
        wait = begin + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(prompt, time.perf_counter())))
    return list(await asyncio.gather(*tasks))


async def _until_ready(http: Http, plan: Run) -> None:
    """Ask for the models until the server answers."""
    end = time.monotonic() + plan.ready_check_timeout_sec
    while True:
        try:
            status, body = await http.get("/v1/models")
            found = f"status {status}: {body[:300].decode(errors='replace')}"
            if status == 200:
                return
        except OSError as error:
            status, found = 0, str(error)
        if status in (401, 403):  # waiting changes nothing
            raise ValueError(f"{plan.base_url} takes no request without its API key; put the key into OPENAI_API_KEY")
        if time.monotonic() >= end:
            raise ValueError(f"no server that is ready answers at {plan.base_url}/v1/models ({found})")
        await asyncio.sleep(0.5)


async def _first_model(http: Http) -> str:
    _, body = await http.get("/v1/models")
    try:
        return json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ValueError("the server lists no model at /v1/models; name one with --model") from None
