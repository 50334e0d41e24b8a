"""Matrix products of few tokens on a GPU: cuBLAS against Torchweave's kernels, with the neighboring ops of a decoder layer.

    python bench/kernels/linear.py --json bench/results/linear_h100_202611.json [--models 1b 8b] [--tokens 1 2 4] [--dtype float16]
    python bench/kernels/linear.py --weights int4 [--group 128] [--zero_points]   # weights in 4 bits, or int8; see int_linear.py
    python bench/kernels/linear.py --weights int4 --layers --models 1b 8b   # decoder layers of such weights
    python bench/kernels/linear.py --read bench/results/linear*_h100_202611.json --table torchweave/compiler/tuning/tables/KIND.json

A candidate is a CUDA graph over 256 MB of distinct weights, so that caches stay cold; the graphs of a row's candidates are replayed
in turn (torchweave/compiler/tuning/measure.py). The first is cuBLAS with separate kernels for the neighboring ops, the reference
for correctness and speed; above FUSED_TOKENS, products run alone. With `dependent`, consecutive calls are dependent launches. The
JSON holds every candidate, the table the best of each kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
import int_linear

from torchweave.compiler.tuning.linears import FUSED_TOKENS, TOKENS, LinearShape, candidates, cold_weights
from torchweave.compiler.tuning.measure import Call, GraphClock, Timing, best_entry
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.ops.linear import run, run_unfused
from torchweave.ops.linear_config import LinearConfig

SUBJECTS = {
    "1b": {
        "qkv": LinearShape(3072, 2048, "n"),
        "o": LinearShape(2048, 2048, "r"),
        "gate_up": LinearShape(16384, 2048, "ng"),
        "down": LinearShape(2048, 8192, "r"),
        "head": LinearShape(128256, 2048),
    },
    "8b": {
        "qkv": LinearShape(6144, 4096, "n"),
        "o": LinearShape(4096, 4096, "r"),
        "gate_up": LinearShape(28672, 4096, "ng"),
        "down": LinearShape(4096, 14336, "r"),
        "head": LinearShape(128256, 4096),
    },
    # With the padded gate of a shared expert after Qwen 3.5's.
    "routers": {"qwen3.5-35b-a3b": LinearShape(264, 2048), "qwen3-30b-a3b": LinearShape(128, 2048)},
}


def _as_it_runs(shape: LinearShape, tokens: int) -> LinearShape:
    return shape if tokens <= FUSED_TOKENS else replace(shape, around="")


def build_all(subjects: list[LinearShape], tokens: list[int], dtype: torch.dtype) -> None:
    """Compile every kernel on all cores before timing, by launches on small weights with the real widths."""

    def build(job: tuple[LinearConfig, int, LinearShape]) -> None:
        config, count, small = job
        x, w = (torch.zeros(rows, small.width, device="cuda", dtype=dtype) for rows in (count, small.outputs))
        try:
            out = torch.empty(count, small.columns, device="cuda", dtype=dtype)
            run(config, x, w, out, small.fused(count, dtype, "cuda"))
        except Exception as error:
            print(f"{config} does not build: {str(error)[:120]}", flush=True)

    jobs = {
        (config, config.padded_tokens(count), replace(_as_it_runs(subject, count), outputs=256))
        for subject in subjects
        for count in tokens
        for config in candidates(count, _as_it_runs(subject, count).around)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, sorted(jobs, key=repr)))
    torch.cuda.synchronize()


def compare(
    name: str, subject: LinearShape, count: int, weights: list[Tensor], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """All candidates of a product for a token count; the first is cuBLAS with separate kernels around it."""
    x, around = torch.randn(count, subject.width, device="cuda", dtype=dtype), subject.fused(count, dtype, "cuda")
    out = torch.empty(count, subject.columns, device="cuda", dtype=dtype)
    expected = run_unfused(x, weights[0], around).float()
    configs: dict[str, LinearConfig] = {}
    calls: dict[str, Call] = {"": lambda i: run_unfused(x, weights[i % len(weights)], around)}
    for config in candidates(count, subject.around):
        try:
            run(config, x, weights[0], out, around)
            torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
        except Exception as error:
            print(f"{name} {count}: {config}: {str(error)[:300]}", flush=True)
            continue
        configs[str(config)] = config
        calls[str(config)] = lambda i, config=config: run(config, x, weights[i % len(weights)], out, around)
    clock = GraphClock(failed=lambda which, error: print(name, which, str(error)[:200], flush=True))
    size = subject.outputs * subject.width * dtype.itemsize
    return [
        {
            "name": name, "outputs": subject.outputs, "width": subject.width, "around": subject.around, "tokens": count,
            "config": asdict(configs[which]) if which else None, "us": round(timing.microseconds, 3),
            "noise": round(timing.noise, 3), "gb_per_s": round(size / timing.microseconds / 1e3, 1),
        }
        for which, timing in clock.time(calls, max(4, len(weights))).items()
    ]  # fmt: skip


def choices(results: list[dict[str, Any]], device: str, command: str) -> Table:
    """The shipped table: for every product and token count the winner by more than the noise."""
    entries: list[Entry] = []
    for name, tokens in dict.fromkeys((r["name"], r["tokens"]) for r in results):
        rows = [r for r in results if (r["name"], r["tokens"]) == (name, tokens)]
        timings = {
            "" if r["config"] is None else str(LinearConfig(**r["config"])): Timing(r["us"], r["noise"]) for r in rows
        }
        shape = LinearShape(rows[0]["outputs"], rows[0]["width"], rows[0]["around"])
        found = best_entry(shape.subject, shape.key, tokens, timings)
        if found is not None and (found.shape, found.tokens) not in {(e.shape, e.tokens) for e in entries}:
            entries.append(found)
    return Table(device, tuple(entries), command)


def kind(config: dict[str, Any] | None) -> str:
    if config is None:
        return "apart"
    return config["kernel"] + ("", "+early", "+late")[config["dependent"]] + ("/norm" if config["norm_apart"] else "")


def table(results: list[dict[str, Any]]) -> str:
    """A row per product and token count: cuBLAS, and the best of each kind as microseconds and gain."""
    lines = [
        "product, T, us of cuBLAS and kernels around it (GB/s of weight); best of each kind: us (gain) tile, warps, depth"
    ]
    for name, tokens in dict.fromkeys((r["name"], r["tokens"]) for r in results):
        rows = [r for r in results if (r["name"], r["tokens"]) == (name, tokens)]
        base, parts = rows[0], []
        for which in dict.fromkeys(kind(r["config"]) for r in rows[1:]):
            best = min((r for r in rows if kind(r["config"]) == which), key=lambda r: r["us"])
            c = best["config"]
            how = f"{c['block_n']}x{c['block_k']},{c['num_warps']},{c['depth']}"
            parts.append(f"{which} {best['us']:.2f} ({base['us'] / best['us']:.2f}) {how}")
        title = f"{name} {base['outputs']}x{base['width']} {base['around']}"
        lines.append(f"{title:28} {tokens:>3} {base['us']:>8.2f} ({base['gb_per_s']:.0f})  " + "  ".join(parts))
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all requested products until the time is up."""
    started, dtype = time.monotonic(), getattr(torch, arguments.dtype)
    subjects = {f"{model} {name}": shape for model in arguments.models for name, shape in SUBJECTS[model].items()}
    if arguments.weights != "float":
        shapes = {name: (shape.outputs, shape.width) for name, shape in subjects.items() if not name.endswith("head")}
        bits, counts = int(arguments.weights.removeprefix("int")), arguments.tokens or int_linear.TOKENS
        kind_of_weight = (bits, arguments.group, arguments.zero_points, dtype)
        if arguments.layers:
            return facts_of(arguments, int_linear.measure_layers(shapes, arguments.tokens or [1, 2], *kind_of_weight))
        results = int_linear.measure(shapes, counts, *kind_of_weight, arguments.seconds)
        return facts_of(arguments, results)
    arguments.tokens = arguments.tokens or list(TOKENS)
    build_all(list(subjects.values()), arguments.tokens, dtype)
    print(f"kernels built in {time.monotonic() - started:.1f} s", flush=True)
    results: list[dict[str, Any]] = []
    for name, shape in subjects.items():
        weights = cold_weights(shape, dtype, torch.device("cuda"))
        for count in arguments.tokens:
            if time.monotonic() > started + arguments.seconds:
                print(f"out of time at {name}, {count} tokens", flush=True)
                break
            results += compare(name, _as_it_runs(shape, count), count, weights, dtype)
    print(f"{len(results)} measurements in {time.monotonic() - started:.1f} s")
    return facts_of(arguments, results)


def facts_of(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results with what they depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "dtype": arguments.dtype, "results": results,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    parser.add_argument(
        "--read", type=Path, nargs="+", help="read the measurements from these JSON files instead of measuring"
    )
    parser.add_argument("--table", type=Path, help="write the tuning table to this file")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--weights", choices=["float", "int4", "int8"], default="float", help="weights of the products")
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale of integer weights")
    parser.add_argument("--zero_points", action="store_true", help="integer weights have zero points")
    parser.add_argument(
        "--layers", action="store_true", help="integer weights: decoder layers and their products alone"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument(
        "--seconds", type=float, default=230, help="time limit of the search over candidates, in seconds"
    )
    arguments = parser.parse_args()
    if arguments.layers and arguments.weights == "float":
        parser.error("--layers measures integer weights; give --weights int4 or int8")
    if arguments.layers and not {"1b", "8b"}.issuperset(arguments.models):
        parser.error("--layers measures whole decoders; give --models 1b, 8b or both")
    if arguments.read:
        read = [json.loads(path.read_text()) for path in arguments.read]
    elif torch.cuda.is_available():
        read = [measure(arguments)]
    else:
        sys.exit("this benchmark needs a CUDA GPU")
    facts = {**read[0], "results": [row for each in read for row in each["results"]]}
    of_integers = int_linear.layer_table if arguments.layers else int_linear.table
    print((table if arguments.weights == "float" else of_integers)(facts["results"]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    if arguments.table:
        measured = "; ".join(f"{each['command']} at {each['commit']}" for each in read)
        found = choices(facts["results"], "-".join(facts["gpu"].lower().split()), measured)
        arguments.table.write_text(found.write())


if __name__ == "__main__":
    main()
