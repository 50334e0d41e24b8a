"""Capture time by model depth: seconds of the `capture` event of the first start of a process, on a CPU.

    python bench/compiler/capture.py --json bench/results/capture_cpu_202611.json [--model llama] [--layers 16 32] [--rounds 5]

Each sample compiles a tiny model of the architecture in a new process with an empty compile cache. Depths alternate; medians are
compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.compiler import compile_graph
from torchweave.compiler.cache.store import CompileCache
from torchweave.config.options import TorchCompileConfig
from torchweave.models import load
from torchweave.ops.registry import boundary_ops
from torchweave.report import Report
from torchweave.verify import zoo

DYNAMIC = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}


def one(name: str, layers: int) -> dict[str, Any]:
    """The capture event of this process."""
    torch.set_num_threads(1)
    zoo_model = zoo.zoo_model(name)
    count = "n_layer" if "n_layer" in zoo_model.options else "num_hidden_layers"
    zoo_model = dataclasses.replace(zoo_model, options={**zoo_model.options, count: layers})
    inputs = {
        "input_ids": torch.zeros(23, dtype=torch.int64),
        "positions": torch.arange(23),
        "logits_index": torch.tensor([4, 9, 22]),
    }
    report = Report(show=False)
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(zoo.build(zoo_model), f"{folder}/model")
        module = load(f"{folder}/model", torch.bfloat16, "cpu", "auto", False, report, 128).module
        cache = CompileCache(f"{folder}/cache", report)
        config = TorchCompileConfig(enable_inductor=False)
        compile_graph(module, inputs, DYNAMIC, boundary_ops=boundary_ops(), config=config, cache=cache, report=report)
    (event,) = report.select("capture")
    return {"seconds": event["seconds"], "operations": event["operations"]}


def in_a_process(name: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", name, "--one", str(layers)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(one(args.model, args.one)))
        return
    runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in args.layers}
    for _ in range(args.rounds):
        for layers, found in runs.items():
            found.append(in_a_process(args.model, layers))
    results = []
    for layers, found in runs.items():
        seconds = sorted(run["seconds"] for run in found)
        results.append({**found[0], "layers": layers, "seconds": round(statistics.median(seconds), 3)})
        results[-1]["all_seconds"] = [round(each, 3) for each in seconds]
        results[-1]["ratio"] = round(results[-1]["seconds"] / results[0]["seconds"], 3)
        print("{layers:>4} layers {operations:>6} operations {seconds:>7.3f} s {ratio:>6.3f}x".format(**results[-1]))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        layers = " ".join(map(str, args.layers))
        head = {
            "command": f"bench/compiler/capture.py --json {args.json} --model {args.model} --layers {layers} "
            f"--rounds {args.rounds}",
            "commit": commit.stdout.strip(),
            "model": args.model,
        }
        machine = {"torch": torch.__version__, "threads": 1}
        args.json.write_text(json.dumps({**head, **machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
