"""`torchweave bench profile`: GPU time of each kernel of a step."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from torchweave.cli.arguments import Parser, add_engine_options, config_from_args
from torchweave.cli.session import engine
from torchweave.report import Report


@dataclass(frozen=True)
class Options:
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


def add_options(parser: Parser) -> None:
    parser.add_config(Options, "profile")
    parser.add_argument("--model", required=True, metavar="MODEL", help="a folder, a hub id, demo or shape:NAME")
    add_engine_options(parser)
    parser.set_defaults(enable_prefix_caching="false")  # a prefix hit would skip the prefill


def measure(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    """Profile the engine of the arguments.

    Raises:
        ValueError: an option is not valid, the engine cannot hold as many requests, or the profiler records no kernel.
    """
    from torchweave.bench.profile import KINDS, profile_all_kinds
    from torchweave.bench.result import environment

    options = config_from_args(Options, args)
    for name in ("running", "input_len", "steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    with engine(args) as llm:
        llm.manager.shutdown(drain=False)  # the profile runs the steps itself
        plan = llm.plan
        running = options.running or min(32, -(-plan.max_batch_size // 2))
        input_len = options.input_len or min(512, plan.max_model_len // 2)
        with Report(show=False if args.quiet else None).progress("steps", len(KINDS)) as advance:
            steps = profile_all_kinds(llm.engine, running, input_len, options.steps, options.seed or 0, advance)
        return {
            "scenario": scenario,
            "model": plan.config.model,
            "dtype": plan.dtype,
            "environment": environment(plan.device, plan.config.num_ranks),
            "plan": {entry.name: entry.effective for entry in plan.entries},
            "steps": steps,
        }
