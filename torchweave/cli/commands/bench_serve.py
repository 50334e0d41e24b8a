"""`torchweave bench serve`: load test of an OpenAI server, with the options and metrics of vLLM's."""

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
    """Requests of the load test.

    Attributes:
        base_url: server address, `http://HOST:PORT`. The API key comes from OPENAI_API_KEY.
        endpoint: `/v1/completions` or `/v1/chat/completions`.
        model: model name. None: the first that the server lists.
        num_prompts: number of requests.
        request_rate: requests per second; `inf` sends all at once.
        burstiness: shape of the arrivals: 1 is a Poisson process, smaller values are burstier, larger ones more even.
        max_concurrency: most open requests; further ones wait in this client. None: no limit.
        input_len: mean prompt length in tokens, without the common prefix.
        output_len: mean number of requested output tokens.
        range_ratio: relative half-width of the uniform distribution of lengths around the mean.
        prefix_len: tokens of a prefix common to all prompts.
        ignore_eos: generate the full output length.
        temperature: sampling temperature.
        extra_body: JSON object with further fields of every request.
        goodput: latency limits in milliseconds, `ttft:200,tpot:30,e2el:5000`; the goodput counts requests within all.
        metric_percentiles: percentiles to report for each metric.
        num_warmups: requests before the measurement; at least one is sent.
        ready_check_timeout_sec: seconds to wait for the server.
        save_detailed: include the data of every request in the result.
        seed: random seed of the workload.
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
    parser.add_config(Options, "load")
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")


def measure(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the load test of the arguments.

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
        metrics, details = run(load_test, advance)
    return {
        "scenario": scenario,
        "model": metrics["model_id"],
        "dtype": "-",
        "environment": environment("cpu"),
        "endpoint_type": "openai-chat" if options.endpoint.endswith("chat/completions") else "openai",
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "prefix_len": options.prefix_len,
        **metrics,
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
        fields = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"extra_body={text!r} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"extra_body={text!r} is not valid: it takes an object such as '{{\"top_k\": 5}}'")
    return fields


def _first_errors(details: dict[str, Any]) -> dict[str, Any]:
    errors = [error for error in details["errors"] if error]
    return {"errors": errors[:10]} if errors else {}
