"""Wall time of prompts beside the time of their kernels: how far a prefill is bound by the host.

    python bench/engine/prompts.py [--model shape:qwen3-0.6b] [--prompts 16 ... 16384 16x1024] [--plain] [--json FILE]

Prompts (`16x1024`: 16 at once) are random token ids with one output token, and weights are random. `wall` is `LLM.generate` until
the token is on the host, `host` the time in which the loop launches the prompts' steps, `kernels` the time in which at least one
kernel runs, with torch's profiler; wall and host are medians without it. `--plain` also measures an engine whose steps with
prompts are not recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.profile import kernel_gaps
from torchweave.bench.protocol import Workload
from torchweave.bench.result import environment
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.llm import LLM
from torchweave.report import Report

PROMPTS = "16 100 500 1000 2000 3000 3500 4000 4100 6000 8000 12000 16000 16384 16x1024 4x8192"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-0.6b", help="a folder, a hub id or shape:NAME")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS.split(), help="tokens, or REQUESTSxTOKENS")
    parser.add_argument("--repeats", type=int, default=9, help="runs per figure, of which the median counts")
    parser.add_argument("--plain", action="store_true", help="also launch every step by the host")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    rows = measure("recorded", TorchCompileConfig(), args)
    if args.plain:
        rows += measure("plain", TorchCompileConfig(enable_piecewise_cuda_graph=False), args)
    if args.json:
        result = {"environment": environment("cuda:0"), "model": args.model, "prompts": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(engine: str, compile_config: TorchCompileConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each of `--prompts`, which is printed too."""
    config = EngineConfig(
        args.model, load_format="dummy", enable_prefix_caching=False, torch_compile_config=compile_config
    )
    rows: list[dict[str, Any]] = []
    with LLM.from_config(config, Report()) as llm:
        work = Workload(llm, 0)
        graphs = llm.report.select("graphs_recorded")[-1]["bytes"] >> 20
        print(f"{args.model}, {engine}: {graphs} MiB of CUDA graphs, steps of {llm.plan.token_buckets[-1:]} tokens")
        print(
            f"{'prompts':>8} {'wall ms':>9} {'host ms':>9} {'kernels':>9} {'wall/kernels':>13} {'tokens/s':>9}  steps"
        )
        for text in args.prompts:
            count, length = map(int, text.split("x")) if "x" in text else (1, int(text))
            row = {"engine": engine, "prompts": text, **times_of(llm, work, (count, length), args.repeats)}
            ratio, speed = row["wall_ms"] / row["kernels_ms"], 1e3 * count * length / row["wall_ms"]
            times = " ".join(f"{row[name]:>9.3f}" for name in ("wall_ms", "host_ms", "kernels_ms"))
            print(f"{text:>8} {times} {ratio:>13.2f} {speed:>9.0f}  {row['steps']}", flush=True)
            rows.append(row)
    return rows


def times_of(llm: LLM, work: Workload, prompts: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Medians in milliseconds for `prompts`, their number and length."""
    for _ in range(2):
        work.run(work.prompts(*prompts), 1)
    wall, host = [], []
    before = dict(llm.manager.counts)
    for _ in range(repeats):
        llm.manager.timings.clear()
        wall.append(work.run(work.prompts(*prompts), 1))
        time.sleep(0.005)  # the loop notes the timing of the last step after its response
        host.append(sum(timing.launch for timing in llm.manager.timings))
    steps = {how: (count - before.get(how, 0)) / repeats for how, count in llm.manager.counts.items()}
    return {
        "wall_ms": 1e3 * statistics.median(wall),
        "host_ms": 1e3 * statistics.median(host),
        "kernels_ms": kernels_ms(work, prompts),
        "steps": {how: count for how, count in steps.items() if count},
    }


def kernels_ms(work: Workload, prompts: tuple[int, int], runs: int = 3) -> float:
    """Milliseconds in which a kernel runs."""
    with profile(activities=[ProfilerActivity.CUDA]):
        work.run(work.prompts(1, 16), 1)  # a profiler that has just started may miss kernels
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            work.run(work.prompts(*prompts), 1)
        torch.cuda.synchronize()
    kernels = [each for each in profiler.events() or () if each.device_type == DeviceType.CUDA]
    spans = [(each.name, each.time_range.start, each.time_range.end) for each in kernels if not each.is_user_annotation]
    return kernel_gaps(spans)[1] / 1e3 / runs


if __name__ == "__main__":
    main()
