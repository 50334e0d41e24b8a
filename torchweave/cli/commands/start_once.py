"""Child process of `bench startup`: start an engine, generate a token, and print the times as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(text: str) -> int:
    from torchweave.cli.options import build_config
    from torchweave.cli.session import start_llm
    from torchweave.config.options import EngineConfig
    from torchweave.report import Report

    began_at, report = time.monotonic(), Report()
    try:
        llm = start_llm(build_config(EngineConfig, json.loads(text)), report)
    except ValueError as error:
        print(f"torchweave: {error}", file=sys.stderr)
        return 2
    from torchweave.bench.protocol import Workload

    with llm:
        with report.stage("first token"):
            Workload(llm, seed=0).run([[1] * 16], 1)
        facts = {
            "began_at": began_at,
            "first_token_at": time.monotonic(),
            "stages": nested(report.select("stage")),
            "modules_without_bytecode": modules_without_bytecode(),
        }
    print(json.dumps(facts))
    return 0


def modules_without_bytecode() -> int:
    """Number of imported modules without cached bytecode; compiling them doubles the time of imports."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return sum(bool(spec and spec.cached and not os.path.exists(spec.cached)) for spec in specs)


def nested(stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stages in order of their start, as `name`, `seconds` and `within` (the enclosing stage or None).

    `at` of an event is the end of its stage, so enclosed stages precede the enclosing one.
    """
    tolerance = 0.001  # seconds between the clock readings for `seconds` and `at`
    spans = sorted((stage["at"] - stage["seconds"], -stage["at"], stage["name"], stage["seconds"]) for stage in stages)
    ordered: list[dict[str, Any]] = []
    open_spans: list[tuple[float, str]] = []
    for _begin, negative_end, name, seconds in spans:
        while open_spans and open_spans[-1][0] < -negative_end - tolerance:
            open_spans.pop()
        ordered.append({"name": name, "seconds": seconds, "within": open_spans[-1][1] if open_spans else None})
        open_spans.append((-negative_end, name))
    return ordered


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
