"""`torchweave bench serve`: load an OpenAI server and measure what its clients see, with vLLM's names and meanings."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import Parser, config_from_args
from torchweave.config.options import api_key_from_environment
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.bench.serving.run import LoadTest


@dataclass(frozen=True)
class Options:
    """What is sent to which server.

    Attributes:
        base_url: the server, `http://HOST:PORT`. An API key is taken from OPENAI_API_KEY.
        endpoint: what is asked: `/v1/completions` or `/v1/chat/completions`.
        model: the name of the model; null takes the first that the server lists.
        num_prompts: requests.
        request_rate: requests a second; `inf` sends all at once.
        burstiness: of the arrivals: 1 is a Poisson process, below 1 more come in bursts, above 1 they are more even.
        max_concurrency: requests that are open at the same time at the most; further ones wait in this client.
        input_len: tokens of a prompt, on average, without the common beginning.
        output_len: tokens that are asked for, on average.
        range_ratio: lengths are drawn uniformly from this part below to this part above the average.
        prefix_len: tokens with which all prompts begin.
        ignore_eos: ask the server to go on to the full length.
        temperature: of the requests.
        extra_body: JSON fields that go into every request too.
        goodput: limits in milliseconds, `ttft:200,tpot:30,e2el:5000`; requests within all of them are counted as good.
        metric_percentiles: percentiles that are reported of each metric.
        num_warmups: requests before those that are measured; one is always sent.
        ready_check_timeout_sec: how long to wait for the server to answer.
        save_detailed: keep what was seen of each request in the result too.
        seed: of everything that is drawn.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str | None = None
    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: str | None = None
    goodput: tuple[str, ...] = ()
    metric_percentiles: tuple[float, ...] = (99.0,)
    num_warmups: int = 0
    ready_check_timeout_sec: float = 600.0
    save_detailed: bool = False
    seed: int = 0


def add_options(parser: Parser) -> None:
    parser.add_config(Options, "what is sent")
    parser.add_argument("--quiet", action="store_true", help="draw no progress bars")


def measure(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments ask for.

    Raises:
        ValueError: a package of the extra `serve` is missing, an option is not valid, or the server does not answer.
    """
    from torchweave.bench.result import environment

    try:
        from torchweave.bench.serving.run import run
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'torchweave[serve]'") from None
    options = config_from_args(Options, args)
    load_test = _load_test(options)
    with Report(show=False if args.quiet else None).progress("requests", options.num_prompts) as advance:
        found, details = run(load_test, advance)
    return {
        "scenario": scenario,
        "model": found["model_id"],
        "dtype": "-",
        "environment": environment("cpu"),
        "endpoint_type": "openai-chat" if options.endpoint.endswith("chat/completions") else "openai",
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "prefix_len": options.prefix_len,
        **found,
        **(details if options.save_detailed else _first_errors(details)),
    }


def _load_test(options: Options) -> LoadTest:
    from torchweave.bench.serving.run import LoadTest
    from torchweave.bench.serving.workload import Lengths

    checks = (
        ("num_prompts", options.num_prompts >= 1, "at least 1"),
        ("request_rate", options.request_rate > 0, "above 0, or inf"),
        ("burstiness", options.burstiness > 0, "above 0"),
        ("max_concurrency", options.max_concurrency is None or options.max_concurrency >= 1, "at least 1, or null"),
        ("num_warmups", options.num_warmups >= 0, "at least 0"),
        ("metric_percentiles", all(0 <= each <= 100 for each in options.metric_percentiles), "between 0 and 100"),
        ("endpoint", options.endpoint.startswith("/"), "a path such as /v1/completions"),
    )
    for name, holds, expected in checks:
        if not holds:
            raise ValueError(f"{name}={getattr(options, name)} is not valid: it must be {expected}")
    fields = {"temperature": options.temperature} | ({"ignore_eos": True} if options.ignore_eos else {})
    return LoadTest(
        base_url=options.base_url.rstrip("/").removesuffix("/v1"),
        endpoint=options.endpoint,
        model=options.model,
        api_key=api_key_from_environment(),
        lengths=Lengths(options.input_len, options.output_len, options.range_ratio, options.prefix_len),
        num_prompts=options.num_prompts,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        num_warmups=options.num_warmups,
        ready_check_timeout_sec=options.ready_check_timeout_sec,
        percentiles=options.metric_percentiles,
        goodput=dict(_limit(text) for text in options.goodput),
        fields=fields | _object(options.extra_body),
        seed=options.seed,
    )


def _limit(text: str) -> tuple[str, float]:
    from torchweave.bench.serving.figures import GOODPUT

    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name not in GOODPUT or not limit >= 0:
        raise ValueError(
            f"goodput={text!r} is not valid: it takes NAME:MILLISECONDS, the name one of {', '.join(GOODPUT)}"
        )
    return name, limit


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"extra_body={text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"extra_body={text!r} is not valid: it takes an object such as '{{\"top_k\": 5}}'")
    return found


def _first_errors(details: dict[str, Any]) -> dict[str, Any]:
    errors = [error for error in details["errors"] if error]
    return {"errors": errors[:10]} if errors else {}
