"""`torchweave bench profile`: where the time of a step goes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from torchweave.cli.arguments import Parser, add_engine_options, fill
from torchweave.cli.session import engine
from torchweave.log import Report


@dataclass(frozen=True)
class Options:
    """What runs while it is looked at.

    Attributes:
        running: requests that generate.
        input_len: tokens of every prompt: of those that generate, and of those that are read beside them.
        steps: steps of each kind.
        seed: of the prompts.
    """

    running: int = 32
    input_len: int = 512
    steps: int = 16
    seed: int | None = 0


def add_options(parser: Parser) -> None:
    parser.add_config(Options, "what runs")
    parser.add_argument("--model", required=True, metavar="MODEL", help="a folder, a hub id, demo or shape:NAME")
    add_engine_options(parser)
    parser.set_defaults(enable_prefix_caching="false")  # prompts are read, not found


def measure(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments ask for.

    Raises:
        ValueError: an option is not valid, or the engine cannot hold as many requests.
    """
    from torchweave.cli.benchmarks.profile import KINDS, Steps, profile
    from torchweave.cli.benchmarks.result import environment

    options = fill(Options, args)
    for name in ("running", "input_len", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    with engine(args) as llm:
        llm.manager.shutdown(drain=False)  # its steps are taken one by one here
        plan = llm.plan
        work = Steps(llm.engine, options.running, options.input_len, options.steps, options.seed or 0)
        with Report(show=False if args.quiet else None).progress("steps", len(KINDS)) as advance:
            found = [profile(work, kind, advance) for kind in KINDS]
        return {
            "scenario": scenario,
            "model": plan.config.model,
            "dtype": plan.dtype,
            "environment": environment(plan.device, plan.config.num_ranks),
            "plan": {entry.name: entry.effective for entry in plan.entries},
            "steps": found,
        }
