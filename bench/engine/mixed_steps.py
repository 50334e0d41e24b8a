"""Inter-token latency while prompts are prefilled, by mixed step sizes: a simulation, seconds per minute of traffic.

    python bench/engine/mixed_steps.py [--rates 75 100 120] [--json FILE]

Uses the scheduler's rule and the traffic of `torchweave bench serve`. A step costs about as much as that of a 1B model on an H100,
derived from client-side gaps: by its recorded size, or by its rows without prefill. Host time is excluded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.result import environment
from torchweave.bench.serving.workload import Lengths, arrivals
from torchweave.engine.scheduler.policies import step_token_budget

RECORDED = {1: 1.9, 64: 2.0, 128: 2.2, 192: 2.4, 256: 2.65, 384: 3.4, 512: 4.2, 768: 5.2}  # tokens: milliseconds
DECODE, ROW, READ, HTTP = (
    1.13,
    0.0135,
    1 / 140,
    1.5,
)  # milliseconds: decode step, row, prompt token, transfer to the engine
MOST = 8192
LENGTHS = Lengths(544, 264, 0.88, 0)


def sizes_of(unit: int, *first: int) -> tuple[int, ...]:
    """Valid step sizes: the given sizes, and multiples above them."""
    above = (first[-1] // unit + 1) * unit if first else unit
    return (*first, *range(above, MOST + 1, unit))


SIZES = {
    "256, 512": (sizes_of(256), (1, 64, 128, 256, 512, 768)),
    "256, 384, 512": (sizes_of(256, 256, 384, 512, 768), (1, 64, 128, 256, 384, 512, 768)),
    "192, 384 (multiples)": (sizes_of(192), (1, 64, 128, 192, 256, 384, 512, 768)),
    "192, 256, 384, 512": (sizes_of(192, 192, 256, 384, 512, 768), (1, 64, 128, 192, 256, 384, 512, 768)),
    "128, 256, 384 (multiples)": (sizes_of(128), (1, 64, 128, 256, 512, 768)),
    "128, 256, 384, 512": (sizes_of(128, 128, 256, 384, 512, 768), (1, 64, 128, 256, 384, 512, 768)),
}
"""Valid and recorded step sizes; a step is padded to the next recorded size."""


@dataclass
class Request:
    arrived: float
    unread: int
    left: int


def milliseconds(num_generating: int, num_read: int, recorded: Sequence[int]) -> float:
    if not num_read:
        return DECODE + ROW * num_generating
    size = next((size for size in recorded if size >= num_generating + num_read), None)
    return READ * (num_generating + num_read) if size is None else RECORDED[size]


def simulate(
    sizes: Sequence[int], recorded: Sequence[int], rate: float, seed: int, count: int
) -> tuple[list[float], list[float]]:
    """Inter-token latencies and times to first token, in milliseconds."""
    inputs, outputs = LENGTHS.draw(count, np.random.default_rng(seed))
    times = arrivals(count, rate, 1.0, seed)
    coming = [Request(at * 1e3 + HTTP, *each) for at, *each in zip(times, inputs, outputs, strict=True)][::-1]
    now, waiting, generating = 0.0, list[Request](), list[Request]()
    gaps, first = list[float](), list[float]()
    while coming or waiting or generating:
        if not (waiting or generating):
            now = max(now, coming[-1].arrived)
        while coming and coming[-1].arrived <= now:
            waiting.append(coming.pop())
        total = step_token_budget(MOST, sizes, len(generating), sum(request.unread for request in waiting))
        room = total - len(generating)
        for request in waiting:
            part = min(room, request.unread)
            request.unread, room = request.unread - part, room - part
        step = milliseconds(len(generating), total - len(generating) - room, recorded)
        now += step
        gaps += [step] * len(generating)
        done = [request for request in waiting if not request.unread]
        first += [now - request.arrived + HTTP for request in done]
        waiting = [request for request in waiting if request.unread]
        generating += done
        for request in generating:
            request.left -= 1
        generating = [request for request in generating if request.left]
    return gaps, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[75, 100, 120])
    parser.add_argument("--count", type=int, default=900)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for rate in args.rates:
        for name, (sizes, recorded) in SIZES.items():
            runs = [simulate(sizes, recorded, rate, seed, args.count) for seed in range(args.seeds)]
            gaps, first = (np.concatenate(each) for each in zip(*runs, strict=True))
            middle, last = np.percentile(gaps, (50, 99))
            results.append(
                {
                    "rate": rate,
                    "sizes": name,
                    "median_itl_ms": round(float(middle), 2),
                    "p99_itl_ms": round(float(last), 2),
                    "ratio": round(float(last / middle), 2),
                    "median_ttft_ms": round(float(np.percentile(first, 50)), 1),
                    "p99_ttft_ms": round(float(np.percentile(first, 99)), 1),
                }
            )
            print("  ".join(f"{value!s:>8}" for value in results[-1].values()))
    if args.json is not None:
        found = {"scenario": "mixed steps", "simulated": True, "environment": environment("cpu"), "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
