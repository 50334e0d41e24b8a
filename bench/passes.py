"""Gain of each pass: milliseconds per token of engines that differ in their passes only, in one run.

    python bench/passes.py --model shape:llama-1b --json bench/results/passes_llama-1b_h100_202611.json [--batch_sizes 1 8] [--fx]

The first engine has default passes; further engines lack one matching pass each, all passes, or (`--fx`) Inductor, with and without
passes. Or (`--passes`) they lack each of the given passes, and then (`--fx`) all of them without Inductor. Random weights, greedy
decoding, prompts of 128 tokens, measured by the code of `torchweave bench latency`. A ratio above 1 is the pass's gain.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from torchweave.bench.protocol import Sizes, Workload, decode
from torchweave.bench.result import environment
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.llm import LLM
from torchweave.report import Report


def measure(config: EngineConfig, sizes: Sizes) -> dict[str, Any]:
    """An engine's milliseconds per token by batch size, and its passes."""
    report = Report(show=False)
    with LLM.from_config(config, report) as llm:
        rows = decode(Workload(llm, sizes.seed), sizes, lambda *_: None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    matches: dict[str, int] = {}
    for event in report.select("pass"):
        if event.get("enabled"):
            matches[event["name"]] = matches.get(event["name"], 0) + event["matches"]
    return {
        "ms": {str(row["batch_size"]): row["median_tpot_ms"] for row in rows if "median_tpot_ms" in row},
        "matches": matches,
        "startup_s": sum(event["seconds"] for event in report.select("stage") if event["name"] == "compilation"),
    }


def measure_apart(config: EngineConfig, sizes: Sizes) -> dict[str, Any]:
    """`measure` in a new process: on several GPUs only the first engine of a process gets symmetric memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, config, sizes).result()


def variants(
    every: TorchCompileConfig, found: dict[str, int], only: list[str] | None, fx: bool
) -> dict[str, TorchCompileConfig]:
    """The further engines: name -> changed options."""
    asked = {name: count for name, count in found.items() if only is None or name in only}
    without = {f"without {name}": replace(every, disabled_passes=(name,)) for name, count in asked.items() if count}
    if only is not None:
        return without
    none = replace(every, disabled_passes=tuple(found))
    chosen = {**without, "without any pass": none}
    if fx:
        chosen |= {
            "FX code, all passes": replace(every, enable_inductor=False),
            "FX code, without any pass": replace(none, enable_inductor=False),
        }
    return chosen


def table(results: dict[str, dict[str, Any]]) -> str:
    """Milliseconds, and the ratio to the first engine."""
    first = next(iter(results.values()))["ms"]
    lines = [f"| engine | {' | '.join(f'batch {size}' for size in first)} |", "|---|" + "---|" * len(first)]
    for name, result in results.items():
        cells = [f"{ms:.3f} ({ms / first[size]:.3f})" for size, ms in result["ms"].items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:llama-1b")
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file, and the table next to it")
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--output_len", type=int, default=128)
    parser.add_argument("--passes", nargs="+", help="disable only these passes, one at a time")
    parser.add_argument("--quantization", help="quantization of the engines, such as fp8")
    parser.add_argument("--fx", action="store_true", help="measure without Inductor as well")
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--num_kv_blocks", type=int, help="number of KV cache blocks, equal for all engines")
    arguments = parser.parse_args()
    sizes = Sizes(batch_sizes=tuple(arguments.batch_sizes), output_len=arguments.output_len)
    only_fx = arguments.fx and arguments.passes is not None
    every = TorchCompileConfig(enable_piecewise_cuda_graph=False, enable_inductor=not only_fx)
    config = EngineConfig(
        model=arguments.model,
        load_format="dummy" if arguments.model.startswith("shape:") else "auto",
        max_batch_size=max(sizes.batch_sizes),
        num_kv_blocks=arguments.num_kv_blocks,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_prefix_caching=False,
        quantization=arguments.quantization,
        torch_compile_config=every,
    )
    title = " ".join(filter(None, (arguments.model, arguments.quantization, "as FX code" * only_fx)))
    results: dict[str, dict[str, Any]] = {}

    def keep(name: str, changed: TorchCompileConfig) -> None:
        how = measure if config.tensor_parallel_size == 1 else measure_apart
        results[name] = how(replace(config, torch_compile_config=changed), sizes)
        print(f"{name}: {results[name]['ms']}", file=sys.stderr, flush=True)
        if arguments.json:  # after each engine, so that an interrupted run keeps its results
            write(arguments.json, title, results)

    keep("as by default", every)
    found = results["as by default"]["matches"]
    for name, changed in variants(every, found, arguments.passes, arguments.fx).items():
        keep(name, changed)
    print(table(results))


def write(path: Path, title: str, results: dict[str, dict[str, Any]]) -> None:
    """Write the measurements as JSON, and the table as Markdown."""
    facts = {**environment("cuda:0" if torch.cuda.is_available() else "cpu"), "model": title}
    facts["command"] = "python " + " ".join(sys.argv)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": facts, "results": results}, indent=1) + "\n")
    path.with_suffix(".md").write_text(f"# {title}, {facts['device']}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
