"""`torchweave bench SCENARIO --model MODEL`: run a benchmark and save its result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import Parser, add_engine_options, config_from_args, engine_config
from torchweave.cli.commands.bench_profile import add_options as add_profile_options
from torchweave.cli.commands.bench_profile import measure as _profile
from torchweave.cli.commands.bench_serve import add_options as add_serve_options
from torchweave.cli.commands.bench_serve import measure as _serve
from torchweave.cli.output import check_output_path
from torchweave.cli.session import engine
from torchweave.report import Report
from torchweave.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from torchweave.bench.protocol import Sizes
    from torchweave.engine.llm import LLM

SCENARIOS = {
    "latency": "milliseconds per output token of decode batches, and time to first token",
    "throughput": "prompt tokens per second, and output tokens per second over requests of mixed lengths",
    "startup": "seconds to the first token in a new process, with empty and with warm caches",
    "host": "microseconds of host work per decode step, without a device",
    "profile": "microseconds of each kernel of a decode step and of a mixed step",
    "serve": "request rate, token rate and latencies of an OpenAI server under load, measured at the client",
    "suite": "latency and throughput in one engine, with the memory bandwidth",
}


@dataclass(frozen=True)
class Options:
    """Workload of the latency, throughput and host benchmarks.

    Attributes:
        batch_sizes: decode batch sizes.
        input_len, output_len: tokens per request of the decode benchmark.
        ttft_lens: prompt lengths, in tokens, of the time to first token.
        prefill: prefill batches as REQUESTSxTOKENS; each request generates one token.
        num_requests: simultaneous requests of mixed lengths; 0 skips this run.
        mixed_input_len, mixed_output_len: bounds LOW,HIGH of their uniformly drawn lengths, in tokens.
        repeats: runs per figure, of which the median counts; the time to first token takes 7 * repeats - 1 runs.
        compare_requests: simultaneous requests of `--compare`.
        compare_input_len: bounds LOW,HIGH of their prompt lengths, in tokens.
        compare_output_len: output tokens of each.
        running: concurrent requests of the host benchmark.
        seed: random seed of the workload.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    input_len: int = 128
    output_len: int = 128
    ttft_lens: tuple[int, ...] = (16, 1000)
    prefill: tuple[str, ...] = ("16x1024", "4x8192")
    num_requests: int = 512
    mixed_input_len: tuple[int, ...] = (64, 1024)
    mixed_output_len: tuple[int, ...] = (16, 512)
    repeats: int = 3
    compare_requests: int = 32
    compare_input_len: tuple[int, ...] = (8, 64)
    compare_output_len: int = 128
    running: int = 256
    seed: int | None = 0


_SCENARIO_OPTIONS = {
    "latency": ("batch_sizes", "input_len", "output_len", "ttft_lens", "repeats"),
    "throughput": ("prefill", "num_requests", "mixed_input_len", "mixed_output_len", "repeats"),
    "startup": (),
    "host": ("running",),
}
_COMPARE = ("compare_requests", "compare_input_len", "compare_output_len")


def parser(scenario: str) -> Parser:
    model = "" if scenario in ("host", "serve") else "--model MODEL "
    usage = f"torchweave bench {scenario} {model}[OPTION...]"
    cli_parser = Parser(prog=f"torchweave bench {scenario}", usage=usage, description=f"Measure {SCENARIOS[scenario]}.")
    cli_parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write the result to FILE as JSON, and as Markdown next to it"
    )
    cli_parser.add_argument("--json", action="store_true", help="print the result as JSON")
    if scenario in ("serve", "profile"):
        (add_serve_options if scenario == "serve" else add_profile_options)(cli_parser)
        return cli_parser
    names = _SCENARIO_OPTIONS.get(scenario, _SCENARIO_OPTIONS["latency"] + _SCENARIO_OPTIONS["throughput"])
    if scenario in ("throughput", "suite"):
        cli_parser.add_argument(
            "--compare",
            metavar="transformers",
            choices=["transformers"],
            help="also run the same requests through transformers, in alternation (throughput, suite)",
        )
        names += _COMPARE
    measured = (*names, "seed") if scenario not in ("host", "startup") else names
    cli_parser.add_config(
        Options, "benchmark", skip=[item.name for item in fields(Options) if item.name not in measured]
    )
    if scenario == "host":
        cli_parser.add_argument("--quiet", action="store_true", help="show no progress bars")
    else:
        cli_parser.add_argument(
            "--model", required=True, metavar="MODEL", help="a folder, a hub id, demo or shape:NAME"
        )
        add_engine_options(cli_parser)
        cli_parser.set_defaults(enable_prefix_caching="false")  # a prefix hit would skip the prefill under measurement
    return cli_parser


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, SCENARIOS))
        print("usage: torchweave bench SCENARIO [--model MODEL] [OPTION...]\n")
        print("\n".join(f"  {name.ljust(width)}  {text}" for name, text in SCENARIOS.items()))
        if not argv:
            raise ValueError(f"name a scenario: {', '.join(SCENARIOS)}")
        raise SystemExit(0)
    scenario, *rest = argv
    if scenario not in SCENARIOS:
        hint = did_you_mean(scenario, SCENARIOS, f"it is one of {', '.join(SCENARIOS)}")
        raise ValueError(f"unknown scenario {scenario!r}; {hint}")
    args = parser(scenario).parse_argv(rest)
    measure = {"host": _host, "startup": _startup, "serve": _serve, "profile": _profile}.get(scenario, _engine)
    output = _check_output(args.output)
    _print_and_save(measure(scenario, args), output, args.json)
    return 0


def _check_output(requested: Path | None) -> Path | None:
    """Validate the output path before a run that may take hours.

    Raises:
        ValueError: the result cannot be written there.
    """
    if requested is None:
        return None
    if requested.suffix == ".md":
        raise ValueError(
            f"--output {requested}: the Markdown report is written to this name; name the JSON file, such as {requested.stem}.json"
        )
    path = check_output_path("--output", requested)
    check_output_path("--output", path.with_suffix(".md"))
    return path


def _print_and_save(result: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Print the result before saving it, so that a full disk does not lose it."""
    from torchweave.bench.result import save, text

    print(json.dumps(result) if as_json else text(result))
    if output is not None:
        try:
            save(result, output)
        except OSError as error:
            raise ValueError(
                f"--output {output} cannot be written: {error.strerror}; the result is printed above"
            ) from error


def _engine(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torchweave.bench.result import environment
    from torchweave.bench.roofline import add_roofline, memory_bandwidth
    from torchweave.config import choose_device

    options = config_from_args(Options, args)
    sizes = _sizes(options)
    requested = engine_config(args)
    device = choose_device(requested.device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    bandwidth = memory_bandwidth(device)
    if device != "cpu":
        torch.cuda.empty_cache()
    with engine(args) as llm:
        result: dict[str, Any] = _result_header(
            scenario, llm, environment(llm.plan.device, llm.plan.config.num_ranks)
        ) | {"memory_bandwidth": bandwidth}
        report = Report(show=False if args.quiet else None)
        _measure(scenario, llm, sizes, report, result)
        add_roofline(result.get("decode", []), llm, bandwidth)
        if getattr(args, "compare", None):
            result["compare"] = _compare(llm, options, report)
    return result


def _measure(scenario: str, llm: LLM, sizes: Sizes, report: Report, result: dict[str, Any]) -> None:
    from torchweave.bench import protocol

    work = protocol.Workload(llm, sizes.seed)
    if scenario in ("latency", "suite"):
        with report.progress("decode", len(sizes.batch_sizes)) as advance:
            result["decode"] = protocol.decode(work, sizes, advance)
        with report.progress("time to first token", len(sizes.ttft_lens)) as advance:
            result["first_token"] = protocol.first_token(work, sizes, advance)
    if scenario in ("throughput", "suite"):
        with report.progress("prefill", len(sizes.prefill)) as advance:
            result["prefill"] = protocol.prefill(work, sizes, advance)
        if sizes.num_requests:
            with report.progress("mixed requests", 1) as advance:
                result["mixed"] = protocol.mixed(work, sizes, advance)


def _compare(llm: LLM, options: Options, report: Report) -> list[dict[str, Any]]:
    from torchweave.bench.compare import REPEATS, compare

    bounds = _bounds(options.compare_input_len, "compare_input_len")
    with report.progress("comparison with transformers", 3 * (REPEATS + 1)) as advance:
        return compare(llm, options.compare_requests, bounds, options.compare_output_len, options.seed or 0, advance)


def _result_header(scenario: str, llm: LLM, environment: dict[str, Any]) -> dict[str, Any]:
    """Fields of every result: scenario, model, environment and effective options."""
    startup = [{"name": event["name"], "seconds": event["seconds"]} for event in llm.report.select("stage")]
    return {
        "scenario": scenario,
        "model": llm.plan.config.model,
        "dtype": llm.plan.dtype,
        "environment": environment,
        "plan": {entry.name: entry.effective for entry in llm.plan.entries},
        "stages": startup,
    }


def _sizes(options: Options) -> Sizes:
    from torchweave.bench.protocol import Sizes

    for name in ("input_len", "output_len", "repeats", "compare_requests", "compare_output_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    return Sizes(
        batch_sizes=options.batch_sizes,
        input_len=options.input_len,
        output_len=options.output_len,
        decode_repeats=options.repeats,
        ttft_lens=options.ttft_lens,
        ttft_repeats=7 * options.repeats - 1,
        prefill=tuple(_batch(text) for text in options.prefill),
        prefill_repeats=options.repeats,
        num_requests=options.num_requests,
        mixed_input=_bounds(options.mixed_input_len, "mixed_input_len"),
        mixed_output=_bounds(options.mixed_output_len, "mixed_output_len"),
        seed=options.seed or 0,
    )


def _batch(text: str) -> tuple[int, int]:
    count, _, length = text.partition("x")
    if not (count.isdigit() and length.isdigit() and int(count) and int(length)):
        raise ValueError(f"prefill={text!r} is not valid: it takes REQUESTSxTOKENS, such as 16x1024")
    return int(count), int(length)


def _bounds(values: tuple[int, ...], name: str) -> tuple[int, int]:
    low, high = values[0] if values else 0, values[-1] if values else 0
    if len(values) > 2 or not 1 <= low <= high:
        raise ValueError(f"{name}={','.join(map(str, values))} is not valid: it takes LOW,HIGH, such as 64,1024")
    return low, high


def _startup(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torchweave.bench.result import environment
    from torchweave.bench.startup import startup
    from torchweave.cli.arguments import given_options
    from torchweave.config import choose_device

    config = engine_config(args)
    device = choose_device(config.device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    with Report(show=False if args.quiet else None).progress("starting", 2) as advance:
        times = startup(given_options(args), advance)
    return {
        "scenario": scenario,
        "model": config.model,
        "dtype": config.dtype,
        "environment": environment(device, config.num_ranks),
        "startup": times,
    }


def _host(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    from torchweave.bench.host_time import measure_host_time, summary
    from torchweave.bench.result import environment

    options = config_from_args(Options, args)
    if options.running < 1:
        raise ValueError(f"running={options.running} must be at least 1")
    times = summary(measure_host_time(options.running))
    return {
        "scenario": scenario,
        "model": "no model",
        "dtype": "-",
        "environment": environment("cpu"),
        "host": {"num_requests": options.running, **times},
    }
