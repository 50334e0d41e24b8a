"""Gain of each pass: milliseconds of steps with and without it, in one run and in turns.

    python bench/compiler/passes.py --model shape:llama-1b --json bench/results/passes_llama-1b_h100_202611.json [--batch_sizes 1 8]
        [--prompts 512 2048] [--passes rotary_attention ...] [--table torchweave/compiler/tuning/tables/GPU.json] [--fx]

An engine with default passes and one that lacks a pass exist side by side and are measured in turns, for every matching pass or
those of `--passes`; then an engine without any pass, and (`--fx`) engines without Inductor. A row is the median of the rounds, and
its noise half the interquartile range of the rounds' differences. Random weights; decode steps as in `torchweave bench latency`,
and prompts with one output token. `--table` enters the rows into a tuning table: a pass is off at token counts without a gain
beyond noise. Over several ranks (`--tensor_parallel_size`) the engines are measured one after the other, in processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.protocol import Sizes, Workload, decode
from torchweave.bench.result import environment
from torchweave.compiler.tuning.measure import timing_of
from torchweave.compiler.tuning.table import STEPS, Entry, Table, device_kind
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.llm import LLM
from torchweave.report import Report

Times = dict[str, float]
"""Milliseconds by the number of tokens of a step."""


@contextmanager
def opened(config: EngineConfig) -> Iterator[LLM]:
    """An engine, whose memory is free afterwards."""
    with LLM.from_config(config, Report(show=False)) as llm:
        yield llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def step_times(llm: LLM, sizes: Sizes) -> Times:
    """Milliseconds of a token by batch size, and of a prompt by its length."""
    work = Workload(llm, sizes.seed or 0)
    rows = decode(work, sizes, lambda *_: None)
    times = {str(row["batch_size"]): row["median_tpot_ms"] for row in rows if "median_tpot_ms" in row}
    for length in sizes.ttft_lens:
        work.run(work.prompts(1, length), 1)
        times[str(length)] = 1e3 * min(work.run(work.prompts(1, length), 1) for _ in range(3))
    return times


def facts_of(llm: LLM) -> dict[str, Any]:
    """Matches of each enabled pass, and the seconds of compilation."""
    matches: Counter[str] = Counter()
    for event in llm.report.select("pass"):
        if event.get("enabled"):
            matches[event["name"]] += event["matches"]
    stages = llm.report.select("stage")
    return {
        "matches": dict(matches),
        "startup_s": sum(event["seconds"] for event in stages if event["name"] == "compilation"),
    }


def compare(llm: LLM, other: LLM, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Medians of two engines measured in turns: `ms` of the other, `with_ms`, and the noise of their difference."""
    pairs = []
    for index in range(rounds):
        order = (llm, other) if index % 2 == 0 else (other, llm)
        times = {id(each): step_times(each, sizes) for each in order}
        pairs.append((times[id(llm)], times[id(other)]))
    result: dict[str, Any] = {"ms": {}, "with_ms": {}, "noise_ms": {}}
    for size in pairs[0][0]:
        result["with_ms"][size] = median(mine[size] for mine, _ in pairs)
        result["ms"][size] = median(others[size] for _, others in pairs)
        result["noise_ms"][size] = timing_of([others[size] - mine[size] for mine, others in pairs]).noise
    return result


def measure(config: EngineConfig, sizes: Sizes) -> dict[str, Any]:
    """An engine's milliseconds, and its passes."""
    with opened(config) as llm:
        return {"ms": step_times(llm, sizes), **facts_of(llm)}


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
    """Milliseconds, and the ratio to an engine with default passes; `=` marks a difference within the noise."""
    first = next(iter(results.values()))["ms"]
    lines = [f"| engine | {' | '.join(f'{size} tokens' for size in first)} |", "|---|" + "---|" * len(first)]
    for name, result in results.items():
        cells = []
        for size, ms in result["ms"].items():
            own, noise = result.get("with_ms", first)[size], result.get("noise_ms", {}).get(size)
            mark = " =" if noise is not None and abs(ms - own) <= noise else ""
            cells.append(f"{ms:.3f} ({ms / own:.3f}{mark})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def entries_of(results: dict[str, dict[str, Any]], model: str) -> tuple[Entry, ...]:
    """The rows of passes as entries of a tuning table, in microseconds."""
    shape = f"{STEPS}/{model.removeprefix('shape:')}"
    found = []
    for name, result in results.items():
        subject = name.removeprefix("without ")
        for size, noise in result.get("noise_ms", {}).items() if subject != "any pass" else ():
            mine, other = result["with_ms"][size], result["ms"][size]
            times = (round(1e3 * each, 2) for each in (mine, other, noise))
            found.append(Entry(subject, shape, int(size), "on" if other - mine > noise else "", *times))
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:llama-1b")
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file, and the table next to it")
    parser.add_argument("--table", type=Path, help="enter the rows of passes into this tuning table")
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompts", nargs="*", type=int, default=[], help="prompt lengths, in tokens")
    parser.add_argument("--output_len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each engine, in turns")
    parser.add_argument("--passes", nargs="+", help="measure only these passes")
    parser.add_argument("--quantization", help="quantization of the engines, such as fp8")
    parser.add_argument("--fx", action="store_true", help="measure without Inductor as well")
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--num_kv_blocks", type=int, help="number of KV cache blocks of each engine")
    arguments = parser.parse_args()
    sizes = Sizes(
        batch_sizes=tuple(arguments.batch_sizes),
        output_len=arguments.output_len,
        ttft_lens=tuple(arguments.prompts),
        repeats=1,
    )
    only_fx = arguments.fx and arguments.passes is not None
    config = config_of(arguments, sizes, only_fx)
    title = " ".join(filter(None, (arguments.model, arguments.quantization, "as FX code" * only_fx)))
    results: dict[str, dict[str, Any]] = {}
    for name, result in measurements(config, sizes, arguments):
        results[name] = result
        print(f"{name}: {result['ms']}", file=sys.stderr, flush=True)
        if arguments.json:  # after each engine, so that an interrupted run keeps its results
            write(arguments.json, title, results)
    print(table(results))
    if arguments.table:
        enter(arguments.table, entries_of(results, "-".join(title.split())))


def config_of(arguments: argparse.Namespace, sizes: Sizes, only_fx: bool) -> EngineConfig:
    """The engine with default passes, with room for the sizes that are measured."""
    every = TorchCompileConfig(
        enable_piecewise_cuda_graph=bool(sizes.ttft_lens),
        capture_num_tokens=sizes.ttft_lens or None,
        enable_inductor=not only_fx,
    )
    tokens = max(sizes.batch_sizes) * (sizes.input_len + sizes.output_len + 1) + max(sizes.ttft_lens, default=0)
    return EngineConfig(
        model=arguments.model,
        load_format="dummy" if arguments.model.startswith("shape:") else "auto",
        max_batch_size=max(sizes.batch_sizes),
        num_kv_blocks=arguments.num_kv_blocks or tokens // 16 + max(sizes.batch_sizes),
        max_model_len=1 + max((sizes.input_len + sizes.output_len, *sizes.ttft_lens)),
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_prefix_caching=False,
        quantization=arguments.quantization,
        torch_compile_config=every,
    )


def measurements(
    config: EngineConfig, sizes: Sizes, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of each engine, the one with default passes first."""
    every = config.torch_compile_config
    if config.tensor_parallel_size > 1:
        first = measure_apart(config, sizes)
        yield "as by default", first
        for name, changed in variants(every, first["matches"], arguments.passes, arguments.fx).items():
            yield name, measure_apart(replace(config, torch_compile_config=changed), sizes)
        return
    with opened(config) as llm:
        step_times(llm, sizes)
        first = {"ms": step_times(llm, sizes), **facts_of(llm)}
        yield "as by default", first
        for name, changed in variants(every, first["matches"], arguments.passes, arguments.fx).items():
            with opened(replace(config, torch_compile_config=changed)) as other:
                step_times(other, sizes)
                yield name, {**compare(llm, other, sizes, arguments.rounds), **facts_of(other)}


def enter(path: Path, entries: tuple[Entry, ...]) -> None:
    """Enter measurements into a tuning table, over those of the same pass, model and token count."""
    shipped = Table.read(path.read_text()) if path.exists() else Table(device_kind(torch.device("cuda:0")))
    path.write_text(Table(shipped.device, entries, shipped.measured).merged_over(shipped).write())


def write(path: Path, title: str, results: dict[str, dict[str, Any]]) -> None:
    """Write the measurements as JSON, and the table as Markdown."""
    facts = {**environment("cuda:0" if torch.cuda.is_available() else "cpu"), "model": title}
    facts["command"] = "python " + " ".join(sys.argv)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": facts, "results": results}, indent=1) + "\n")
    path.with_suffix(".md").write_text(f"# {title}, {facts['device']}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
