"""Gain of the reinplace pass: a functional graph with two in-place candidates, with and without the pass.

    python bench/compiler/reinplace.py --json bench/results/reinplace_cpu_202611.json [--width 4096]

None of Torchweave's ops mutates its arguments within a piece; ops of a user's model may. The graph creates a tensor `[T,
width]`, and an op adds two others to it. The median of 30 rounds of 20 calls, both forms in turn, as FX code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.passes.aten.reinplace import Reinplace
from torchweave.compiler.passes.testing import T, graph_of

TOKENS, ROUNDS, CALLS = (1, 8, 32, 128, 512), 30, 20


@torch.library.custom_op("bench::add_into", mutates_args=("out",))
def add_into(x: Tensor, out: Tensor) -> None:
    """out += x."""
    out.add_(x)


def filled(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    torch.ops.bench.add_into(x, out)
    torch.ops.bench.add_into(y, out)
    return out


def forms(width: int) -> dict[str, Callable[..., Any]]:
    """The lowered graph before and after the pass."""
    examples = [torch.randn(T, width), torch.randn(T, width)]
    plain, written = graph_of(filled, examples), graph_of(filled, examples)
    with dynamic_shapes_mode("backed_size_oblivious"):
        assert Reinplace().run(written).matches == 2
    written.module.recompile()
    return {"without": plain.module, "with": written.module}


def measure(calls: dict[str, Callable[..., Any]], tokens: int, width: int, device: str) -> dict[str, float]:
    """Microseconds per call of each graph."""
    x, y = torch.randn(2, tokens, width, device=device).unbind()
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                call(x, y)
                if device != "cpu":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call(x, y)
                if device != "cpu":
                    torch.cuda.synchronize()
                times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    calls = forms(arguments.width)
    results = [{"tokens": tokens, **measure(calls, tokens, arguments.width, device)} for tokens in TOKENS]
    for row in results:
        print(row)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        facts = {
            "command": "python " + " ".join(sys.argv),
            "commit": commit.stdout.strip(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread",
            "torch": torch.__version__,
            "width": arguments.width,
        }
        arguments.json.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
