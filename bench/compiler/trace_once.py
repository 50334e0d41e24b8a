"""Compare a cold start with and without tracing repeated layers once: seconds to the first token of a tiny model, on a CPU.

    python bench/compiler/trace_once.py --json bench/results/trace-once_cpu_202611.json [--layers 16 48 80] [--rounds 2]

Each start is a process with empty caches; starts with and without alternate. `cpu_seconds` covers the process and its children.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def start_once(layers: int, trace_once: bool, folder: str) -> dict[str, Any]:
    """Start an engine in this process and generate one token."""
    begin = time.monotonic()
    import torch

    import torchweave.compiler.backend as backend
    from torchweave import LLM, SamplingParams, TorchCompileConfig
    from torchweave.verify import zoo

    torch.set_num_threads(1)
    zoo_model = zoo.zoo_model("llama")
    zoo_model = dataclasses.replace(zoo_model, options={**zoo_model.options, "num_hidden_layers": layers})
    zoo.save(zoo.build(zoo_model), f"{folder}/model")
    backend.capture = functools.partial(backend.capture, trace_once=trace_once)
    config = TorchCompileConfig(compile_cache_dir=f"{folder}/cache")
    with LLM(f"{folder}/model", max_num_tokens=256, max_batch_size=4, torch_compile_config=config) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0))
        (capture,) = llm.report.select("capture")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": round(time.monotonic() - begin, 2),
        "capture_seconds": round(capture["seconds"], 2),
        "cpu_seconds": round(sum(each.ru_utime + each.ru_stime for each in used), 2),
    }


def in_a_process(layers: int, trace_once: bool) -> dict[str, Any]:
    """The figures of a start in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--start", str(layers), str(int(trace_once)), folder]
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 48, 80])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start is not None:
        layers, trace_once, folder = args.start
        print(json.dumps(start_once(int(layers), trace_once == "1", folder)))
        return
    results = []
    for layers in args.layers:
        runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _ in range(args.rounds):
            for trace_once, starts in runs.items():
                starts.append(in_a_process(layers, trace_once))
        medians = {
            name: {key: round(statistics.median(each[key] for each in runs[on]), 2) for key in runs[on][0]}
            for name, on in (("trace_once", True), ("plain", False))
        }
        saved = 1 - medians["trace_once"]["cpu_seconds"] / medians["plain"]["cpu_seconds"]
        results.append({"layers": layers, **medians, "cpu_saved": round(saved, 3)})
        print(json.dumps(results[-1]), flush=True)
    if args.json is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        args.json.write_text(
            json.dumps({"command": " ".join(sys.argv), "commit": commit, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
