"""Inductor's reductions of rows: in a loop, as Inductor builds them above 1024 numbers, and in registers, in CUDA graphs.

    python bench/compiler/row_reductions.py --json bench/results/row-reductions_h100_202611.json [--widths 1152] [--rows 4096]

A graph holds a call on each of many copies of the operands, so that caches stay cold; graphs of both builds are replayed in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from torchweave.bench.result import header
from torchweave.compiler import compile_graph
from torchweave.compiler.codegen import row_reductions
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.tuning.measure import GraphClock
from torchweave.config.options import TorchCompileConfig

COPIES_BYTES = 256 << 20
MOST_COPIES = 100
INDUCTORS_LIMIT = 1024
BUILDS = {"loop": INDUCTORS_LIMIT, "registers": row_reductions.MAX_ROW}


class AddLayerNorm(nn.Module):
    """A residual addition and a LayerNorm, as between the attention and the MLP of a vision tower."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.norm(total), total


class Softmax(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return F.softmax((x + bias).float(), -1).to(x.dtype)


def operations(width: int) -> dict[str, nn.Module]:
    return {"add_layer_norm": AddLayerNorm(width), "softmax": Softmax()}


def measure(module: nn.Module, width: int, rows: list[int], clock: GraphClock) -> list[dict[str, Any]]:
    """One result per build and number of rows."""
    module = module.cuda().to(torch.bfloat16).requires_grad_(False)
    names = [*module.forward.__annotations__][:2]

    def operands(count: int) -> list[Tensor]:
        return [torch.randn(count, width, device="cuda").to(torch.bfloat16) for _ in names]

    built, dynamic = {}, {name: {0: "T"} for name in names}
    for build, limit in BUILDS.items():
        row_reductions.MAX_ROW = limit
        inputs = dict(zip(names, operands(64), strict=True))
        with fresh_cache():  # Inductor's key does not have the limit
            built[build] = compile_graph(
                module, inputs, dynamic, config=TorchCompileConfig(compile_cache=False), passes=[]
            )
    results = []
    for count in rows:
        copies = [operands(count) for _ in range(min(MOST_COPIES, max(4, COPIES_BYTES // (count * width * 4))))]
        calls = {build: lambda i, g=graph, c=copies: g(call_op, *c[i]) for build, graph in built.items()}
        times = clock.time(calls, len(copies))
        results += [{"rows": count, "width": width, "build": build} | asdict(timing) for build, timing in times.items()]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    parser.add_argument("--widths", nargs="+", type=int, default=[1152, 1280, 2048, 3072, 4096])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 256, 4096])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    clock, results = GraphClock(), []
    for width in arguments.widths:
        for name, module in operations(width).items():
            found = measure(module, width, arguments.rows, clock)
            results += [{"operation": name} | result for result in found]
            for count in arguments.rows:
                of_count = {each["build"]: each for each in found if each["rows"] == count}
                times = "".join(
                    f"  {build} {each['microseconds']:7.2f} +-{each['noise']:5.2f}" for build, each in of_count.items()
                )
                print(f"{name:15} {width:5} x {count:5}{times}", flush=True)
        if arguments.json:  # after each width, so that a run that is cut has figures
            facts = header("row_reductions", ", ".join(map(str, arguments.widths)), device="cuda")
            arguments.json.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
