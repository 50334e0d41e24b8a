"""`torchweave collect-env`: what a report of a fault should say about this machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from typing import Any

from torchweave.cli.arguments import Parser
from torchweave.cli.output import print_table
from torchweave.config.options import vllm_variables

DESCRIPTION = """Show versions, processors, GPUs, memory and the C++ compiler of this machine, for a report of a fault. vLLM's
variables are listed by name, without their values."""


def parser() -> Parser:
    cli_parser = Parser(prog="torchweave collect-env", usage="torchweave collect-env [--json]", description=DESCRIPTION)
    cli_parser.add_argument("--json", action="store_true", help="print a JSON object")
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    facts = environment_facts()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print_table("Environment", ("fact", "value"), [(key, _text(value)) for key, value in facts.items()])
    return 0


def environment_facts() -> dict[str, Any]:
    """Facts of this machine and its packages by name."""
    import torch

    from torchweave.bench.result import environment
    from torchweave.engine.startup.device_facts import device_facts

    measured = environment("cpu")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        **measured["versions"],
        "python": measured["python"],
        "commit": measured["commit"],
        "system": platform.platform(),
        "processor": measured["device"],
        "cores": len(os.sched_getaffinity(0)),
        "threads of torch": measured["num_threads"],
        "memory": _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "CUDA of torch": measured["cuda"],
        "GPUs": [f"{each.name}, {_gib(each.total_memory)}, sm_{each.major}{each.minor}" for each in gpus],
        "C++ compiler": device_facts("cpu").inductor_refusal or "found",
        "variables": sorted(vllm_variables()),
    }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return "none" if value is None else str(value)
