"""Small-token matrix products on a GPU: cuBLAS against the project's kernels, in one CUDA graph, with cold weights.

    python bench/linear.py --json bench/results/linear_h100_202611.json [--models 1b 8b] [--tokens 1 2 4] [--dtype float16]

Each measurement records one graph that runs the product on as many distinct weights as make 256 MB, so that every weight comes
from memory and not from a cache, and times replays of it. Every candidate must agree with cuBLAS before it is timed. The JSON
holds every candidate (microseconds a product, GB/s of weight); the table the best of each kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from torchweave.ops.linear import LinearConfig, choose

SHAPES = {
    "1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192), "head": (128256, 2048)},
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)},
}
COLD_BYTES = 256 << 20
REPLAYS = 12


def candidates(tokens: int) -> list[LinearConfig]:
    """The configurations that are tried at a number of tokens."""
    found = []
    if tokens <= 2:
        shapes = [(4, 1024, 4, 4), (4, 2048, 4, 2), (8, 1024, 4, 2), (8, 512, 4, 4), (16, 512, 8, 4), (2, 2048, 4, 4)]
        found += [LinearConfig("row", *shape, dependent) for shape in shapes for dependent in (False, True)]
    if 2 <= tokens <= 32:
        shapes = [(16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 5)]
        found += [LinearConfig("dot", *shape) for shape in shapes]
        found += [LinearConfig("dot", 16, 256, 4, 4, True), LinearConfig("dot", 32, 128, 4, 5, True)]
    return found


def measure(run: Callable[[Tensor, Tensor, Tensor], None], x: Tensor, weights: list[Tensor], out: Tensor) -> float:
    """Microseconds of one product: the median replay of a graph that runs it on every weight, over their number."""
    rounds = -(-4 // len(weights))
    turns = weights * rounds

    def all_of_them() -> None:
        for weight in turns:
            run(x, weight, out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x, weights[0], out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(second) for first, second in pairwise(marks))
    return times[len(times) // 2] * 1e3 / len(turns)


def compile_all(shapes: list[tuple[int, int]], tokens: list[int], dtype: torch.dtype) -> None:
    """Build every kernel on all cores before anything is timed: launches on small weights with the real widths."""

    def build(job: tuple[LinearConfig, int, int]) -> None:
        config, num_tokens, width = job
        x = torch.zeros(num_tokens, width, device="cuda", dtype=dtype)
        w = torch.zeros(64, width, device="cuda", dtype=dtype)
        config.run(x, w, None, torch.empty(num_tokens, 64, device="cuda", dtype=dtype))

    widths = sorted({width for _, width in shapes})
    # Kernels differ by configuration, width, and padded tokens: exactly 1 or 2 for rows, 16 or 32 for dots.
    jobs = {(c, t if c.kernel == "row" else (16 if t <= 16 else 32), w) for t in tokens for c in candidates(t) for w in widths}
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, sorted(jobs, key=repr)))
    torch.cuda.synchronize()


def compare(name: str, outputs: int, width: int, tokens: list[int], dtype: torch.dtype, deadline: float) -> list[dict]:
    """All candidates of one shape at each number of tokens; stops early, and says so, at the deadline."""
    size = outputs * width * dtype.itemsize
    copies = -(-COLD_BYTES // size)
    weights = [torch.empty(outputs, width, device="cuda", dtype=dtype).normal_(std=width**-0.5) for _ in range(copies)]
    results = []
    for num_tokens in tokens:
        x = torch.randn(num_tokens, width, device="cuda", dtype=dtype)
        out = torch.empty(num_tokens, outputs, device="cuda", dtype=dtype)

        def record(kind: str, microseconds: float, config: LinearConfig | None, count: int = num_tokens) -> None:
            results.append({
                "name": name, "outputs": outputs, "width": width, "tokens": count, "kind": kind,
                "us": round(microseconds, 3), "gb_per_s": round(size / microseconds / 1e3, 1),
                "config": asdict(config) if config else None,
                "chosen": config is not None and config == choose(count, outputs, width, dtype),
            })  # fmt: skip

        record("cublas", measure(lambda x, w, out: torch.mm(x, w.T, out=out), x, weights, out), None)
        expected = F.linear(x, weights[0]).float()
        for config in candidates(num_tokens):
            if time.monotonic() > deadline:
                print(f"out of time at {name}, {num_tokens} tokens", flush=True)
                return results
            try:
                config.run(x, weights[0], None, out)
                torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
                us = measure(lambda x, w, out, config=config: config.run(x, w, None, out), x, weights, out)
            except Exception as error:  # a configuration may ask for more shared memory than there is
                results.append({"name": name, "tokens": num_tokens, "config": asdict(config), "error": str(error)[:200]})
                continue
            record(config.kernel + ("+pdl" if config.dependent else ""), us, config)
    return results


def table(results: list[dict]) -> str:
    """One line for each shape and number of tokens: cuBLAS, and the best of each kind as microseconds and gain."""
    explained = "best of each kind: us (cuBLAS / it) block_n x block_k, warps, depth"
    lines = [f"{'shape':28} {'T':>3} {'cuBLAS us':>10} {'GB/s':>6}   {explained}"]
    timed = [r for r in results if "us" in r]
    for name, tokens in dict.fromkeys((r["name"], r["tokens"]) for r in timed):
        rows = [r for r in timed if (r["name"], r["tokens"]) == (name, tokens)]
        base = rows[0]
        parts = []
        for kind in dict.fromkeys(r["kind"] for r in rows[1:]):
            best = min((r for r in rows if r["kind"] == kind), key=lambda r: r["us"])
            c = best["config"]
            how = f"{c['block_n']}x{c['block_k']},{c['num_warps']},{c['depth']}"
            parts.append(f"{kind} {best['us']:.1f} ({base['us'] / best['us']:.2f}) {how}")
        title = f"{name} {base['outputs']}x{base['width']}"
        lines.append(f"{title:28} {tokens:>3} {base['us']:>10.1f} {base['gb_per_s']:>6.0f}   " + "   ".join(parts))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every measurement")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=80, help="stop trying candidates after this long")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    started = time.monotonic()
    dtype = getattr(torch, arguments.dtype)
    shapes = [(f"{model} {name}", *shape) for model in arguments.models for name, shape in SHAPES[model].items()]
    compile_all([shape[1:] for shape in shapes], arguments.tokens, dtype)
    print(f"kernels built in {time.monotonic() - started:.1f} s", flush=True)
    results = []
    for shape in shapes:
        results += compare(*shape, arguments.tokens, dtype, started + arguments.seconds)
    print(table(results))
    print(f"{len(results)} measurements in {time.monotonic() - started:.1f} s")
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        facts = {
            "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "dtype": arguments.dtype, "cold_bytes": COLD_BYTES, "results": results,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
