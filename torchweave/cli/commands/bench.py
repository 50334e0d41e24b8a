"""`torchweave bench SCENARIO --model MODEL`: run a benchmark and save its result."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweave.bench.protocol import Sizes
from torchweave.bench.serving.load_test import LoadTest
from torchweave.cli.arguments import Parser, add_engine_options, config_from_args, engine_config, given_options
from torchweave.cli.output import check_output_path, print_advice
from torchweave.cli.session import engine
from torchweave.config import EngineConfig, choose_device
from torchweave.report import Report
from torchweave.utils.suggest import did_you_mean

if TYPE_CHECKING:
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
class ProfileOptions:
    """Workload of the profile.

    Attributes:
        running: decoding requests. None: 32, at most half of max_batch_size, since prefills need slots too.
        input_len: tokens of every prompt. None: 512, at most half of max_model_len.
        steps: profiled steps of each kind.
        seed: random seed of the prompts.
    """

    running: int | None = None
    input_len: int | None = None
    steps: int = 16
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
    if scenario == "serve":
        cli_parser.add_config(LoadTest, "load")
        cli_parser.add_argument("--quiet", action="store_true", help="show no progress bars")
        return cli_parser
    if scenario == "profile":
        cli_parser.add_config(ProfileOptions, "profile")
        _add_engine(cli_parser)
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
    if measured:
        cli_parser.add_config(Sizes, "benchmark", [item.name for item in fields(Sizes) if item.name in measured])
    if scenario == "host":
        cli_parser.add_argument("--quiet", action="store_true", help="show no progress bars")
    else:
        _add_engine(cli_parser)
    return cli_parser


def _add_engine(cli_parser: Parser) -> None:
    cli_parser.add_argument("--model", required=True, metavar="MODEL", help="a folder, a hub id, demo or shape:NAME")
    add_engine_options(cli_parser)
    cli_parser.set_defaults(enable_prefix_caching="false")  # a prefix hit would skip the prefill under measurement


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

    from torchweave.bench.result import engine_header
    from torchweave.bench.roofline import add_roofline, memory_bandwidth

    sizes = config_from_args(Sizes, args)
    device = _device(engine_config(args))
    bandwidth = memory_bandwidth(device)
    if device != "cpu":
        torch.cuda.empty_cache()
    with engine(args) as llm:
        stages = [{"name": event["name"], "seconds": event["seconds"]} for event in llm.report.select("stage")]
        result = engine_header(scenario, llm.plan) | {"stages": stages, "memory_bandwidth": bandwidth}
        report = Report(show=False if args.quiet else None)
        _measure(scenario, llm, sizes, report, result)
        add_roofline(result.get("decode", []), llm, bandwidth)
        if getattr(args, "compare", None):
            result["compare"] = _compare(llm, sizes, report)
    return result


def _device(config: EngineConfig) -> str:
    import torch

    return choose_device(config.device, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _measure(scenario: str, llm: LLM, sizes: Sizes, report: Report, result: dict[str, Any]) -> None:
    from torchweave.bench import protocol

    work = protocol.Workload(llm, sizes.seed or 0)
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


def _compare(llm: LLM, sizes: Sizes, report: Report) -> list[dict[str, Any]]:
    from torchweave.bench.compare import REPEATS, compare

    with report.progress("comparison with transformers", 3 * (REPEATS + 1)) as advance:
        return compare(llm, sizes, advance)


def _startup(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    from torchweave.bench.result import header
    from torchweave.bench.startup import startup

    print_advice(args.advice)
    config = engine_config(args)
    device = _device(config)
    with Report(show=False if args.quiet else None).progress("starting", 2) as advance:
        times = startup(given_options(args), advance)
    return header(scenario, config.model, config.dtype, device, config.num_ranks) | {"startup": times}


def _host(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    from torchweave.bench.host_time import measure_host_time, summary
    from torchweave.bench.result import header

    running = config_from_args(Sizes, args).running
    times = summary(measure_host_time(running))
    return header(scenario, "no model") | {"host": {"num_requests": running, **times}}


def _profile(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    from torchweave.bench.profile import KINDS, profile_all_kinds
    from torchweave.bench.result import engine_header

    options = config_from_args(ProfileOptions, args)
    for name in ("running", "input_len", "steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    with engine(args) as llm:
        llm.manager.shutdown(drain=False)  # the profile runs the steps itself
        running = options.running or min(32, -(-llm.plan.max_batch_size // 2))
        input_len = options.input_len or min(512, llm.plan.max_model_len // 2)
        with Report(show=False if args.quiet else None).progress("steps", len(KINDS)) as advance:
            steps = profile_all_kinds(llm.engine, running, input_len, options.steps, options.seed or 0, advance)
        return engine_header(scenario, llm.plan) | {"steps": steps}


def _serve(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    from torchweave.bench.result import header

    try:
        from torchweave.bench.serving.run import run
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'torchweave[serve]'") from None
    load_test = config_from_args(LoadTest, args)
    with Report(show=False if args.quiet else None).progress("requests", load_test.num_prompts) as advance:
        metrics, details = run(load_test, advance)
    errors = [error for error in details["errors"] if error][:10]
    return {
        **header(scenario, metrics["model_id"]),
        "endpoint_type": "openai-chat" if load_test.endpoint.endswith("chat/completions") else "openai",
        "num_prompts": load_test.num_prompts,
        "request_rate": "inf" if math.isinf(load_test.request_rate) else load_test.request_rate,
        "burstiness": load_test.burstiness,
        "max_concurrency": load_test.max_concurrency,
        "prefix_len": load_test.prefix_len,
        **metrics,
        **(details if load_test.save_detailed else {"errors": errors} if errors else {}),
    }
