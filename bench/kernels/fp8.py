"""FP8 on a GPU: quantization and products against cuBLAS in bf16 and FP8, in a CUDA graph with cold weights.

    python bench/kernels/fp8.py --json bench/results/fp8_h100_202611.json [--tokens 1 2 4] [--shapes qkv down] [--part products]

A sample replays a graph that runs the product on 256 MB of distinct weights (or 4 products). Candidates: cuBLAS in bf16,
`_scaled_mm` (scales per row with fast and exact accumulation; 1 x 128 by 128 x 128 blocks), and configurations of Torchweave's
kernels. Each must agree with the reference before it is timed. `--part fused` times ops with FP8 output: quantization alone, the
preceding op alone, and the fused op, over distinct tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
import torchweave.ops.quant.fp8_fused  # noqa: F401  (defines the fused ops)
from torchweave.ops.quant.fp8 import FP8, GROUP, quantize
from torchweave.ops.quant.fp8_linear import Fp8Config, block_scales, choose, scaled_mm_blocks, scaled_mm_rows

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
COLD_BYTES = 256 << 20
REPLAYS = 10


def candidates(tokens: int, blocks: bool) -> list[Fp8Config]:
    """Candidate configurations for a token count."""
    found: list[Fp8Config] = []
    if tokens <= 2:
        for shape in (
            (2, 2048, 4, 4),
            (4, 2048, 4, 2),
            (4, 1024, 4, 4),
            (2, 4096, 4, 2),
            (8, 1024, 4, 2),
            (8, 512, 4, 4),
            (4, 4096, 8, 2),
        ):
            found += [Fp8Config("row", *shape, dependent=dependent) for dependent in (False, True)]
    if 2 <= tokens <= 64:
        block_t = max(16, 1 << (tokens - 1).bit_length())
        deep = 128 if blocks else 256
        for shape in (
            (16, deep, 4, 5),
            (16, deep, 2, 6),
            (32, deep, 4, 5),
            (32, 128, 4, 8),
            (64, 128, 4, 6),
            (64, 128, 4, 8),
        ):
            found.append(Fp8Config("dot", *shape, block_t))
        found += [Fp8Config("dot", 16, deep, 4, 5, block_t, True), Fp8Config("dot", 64, 128, 4, 6, block_t, True)]
    if tokens >= 64:
        found += [Fp8Config("dot", 128, 128, 8, 4, 128), Fp8Config("dot", 128, 128, 4, 4, 64)]
    return found


def measure(run: Callable[[int], Any], count: int) -> float:
    """Microseconds per call: the median replay of a graph that calls `run(0..count-1)`, over `count`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            run(index)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(second) for first, second in pairwise(marks))
    return times[len(times) // 2] * 1e3 / count


def compile_all(widths: set[int], tokens: list[int]) -> None:
    """Compile every kernel on all cores before timing, by launches on small weights with the real widths."""

    def build(job: tuple[Fp8Config, int, int, bool]) -> None:
        config, num_tokens, width, blocks = job
        q, s = quantize(torch.zeros(num_tokens, width, device="cuda"), GROUP if blocks else 0)
        w = torch.zeros(128, width, device="cuda").to(FP8)
        scale = block_scales(torch.ones(1, width // GROUP, device="cuda")) if blocks else torch.ones(128, device="cuda")
        with contextlib.suppress(Exception):  # failures are reported by the timing
            config.run(q, s, w, scale, None, torch.empty(num_tokens, 128, device="cuda", dtype=torch.bfloat16))

    jobs: dict[Any, tuple[Fp8Config, int, int, bool]] = {}
    for width in widths:
        for num_tokens in tokens:
            for blocks in (False, True):
                for config in candidates(num_tokens, blocks):
                    key = (config, num_tokens if config.kernel == "row" else 0, width, blocks)
                    jobs.setdefault(key, (config, num_tokens, width, blocks))
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, jobs.values()))
    torch.cuda.synchronize()


class Product:
    """A shape with weights in bf16 and both FP8 schemes."""

    def __init__(self, name: str, outputs: int, width: int) -> None:
        self.name, self.outputs, self.width = name, outputs, width
        self.count = max(4, -(-COLD_BYTES // (outputs * width)))
        self.half = [
            torch.randn(outputs, width, device="cuda", dtype=torch.bfloat16) for _ in range(max(4, self.count // 2))
        ]
        self.weights = [torch.randn(outputs, width, device="cuda").mul_(100).to(FP8) for _ in range(self.count)]
        self.by_row = torch.rand(outputs, device="cuda") / 1e4
        self.by_block = block_scales(torch.rand(-(-outputs // GROUP), -(-width // GROUP), device="cuda") / 1e4)

    def rows(self, tokens: int, deadline: float) -> list[dict[str, Any]]:
        """Every candidate for a token count."""
        x = torch.randn(tokens, self.width, device="cuda", dtype=torch.bfloat16)
        found = [
            self._row(
                tokens, "bf16", "cublas", measure(lambda i: x @ self.half[i % len(self.half)].t(), len(self.half)), None
            )
        ]
        for blocks in (False, True):
            scheme = "block" if blocks else "row"
            q, s = quantize(x, GROUP if blocks else 0)
            scale = self.by_block if blocks else self.by_row
            few = min(tokens, 32)  # as many as the reference checks, on the CPU
            operands = (q[:few], s[:, :few] if blocks else s[:few], self.weights[0], scale)
            right = torch.ops.torchweave.fp8_linear(*(each.cpu() for each in operands), None, torch.float32).cuda()
            library = scaled_mm_blocks if blocks else scaled_mm_rows
            kernels: list[tuple[str, Fp8Config | None, Callable[[int, Tensor], Tensor]]] = [
                (
                    "scaled_mm",
                    None,
                    lambda i, out, q=q, s=s, scale=scale, run=library: run(
                        q, s, self.weights[i], scale, None, torch.bfloat16
                    ),
                )
            ]
            if not blocks:
                kernels.append(
                    (
                        "scaled_mm exact",
                        None,
                        lambda i, out, q=q, s=s: torch._scaled_mm(
                            q, self.weights[i].t(), s, self.by_row[None], out_dtype=torch.bfloat16, use_fast_accum=False
                        ),
                    )
                )
            for config in candidates(tokens, blocks):
                kernels.append(
                    (
                        config.kernel + ("+pdl" if config.dependent else ""),
                        config,
                        lambda i, out, q=q, s=s, scale=scale, c=config: (
                            c.run(q, s, self.weights[i], scale, None, out),
                            out,
                        )[1],
                    )
                )
            for kind, config, run in kernels:
                if time.monotonic() > deadline:
                    print(f"out of time at {self.name}, {tokens} tokens", flush=True)
                    return found
                out = torch.empty(tokens, self.outputs, device="cuda", dtype=torch.bfloat16)
                try:
                    torch.testing.assert_close(
                        run(0, out)[:few].float(), right, rtol=2e-2, atol=2e-2 * float(right.abs().max())
                    )
                    us = measure(lambda i, run=run, out=out: run(i, out), self.count)
                except Exception as error:  # e.g. too much shared memory
                    found.append(
                        {
                            "name": self.name,
                            "tokens": tokens,
                            "scheme": scheme,
                            "kind": kind,
                            "error": str(error)[:200],
                            "config": str(config),
                        }
                    )
                    continue
                found.append(self._row(tokens, scheme, kind, us, config))
        return found

    def _row(self, tokens: int, scheme: str, kind: str, us: float, config: Fp8Config | None) -> dict[str, Any]:
        size = self.outputs * self.width * (2 if scheme == "bf16" else 1)
        return {
            "name": self.name, "outputs": self.outputs, "width": self.width, "tokens": tokens, "scheme": scheme, "kind": kind,
            "us": round(us, 3), "gb_per_s": round(size / us / 1e3, 1),
            "tflops": round(2 * tokens * self.outputs * self.width / us / 1e6, 1),
            "config": None if config is None else str(config),
            "chosen": scheme != "bf16" and config == choose(tokens, self.outputs, self.width, blocks=scheme == "block"),
        }  # fmt: skip


def fused(tokens: int) -> list[dict[str, Any]]:
    """Norm and activation of 8B, quantization, and both fused, for a token count."""
    count, found = 24, []
    x = [torch.randn(1, tokens, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    wide = [
        torch.randn(1, tokens, 28672, device="cuda", dtype=torch.bfloat16) for _ in range(count if tokens <= 256 else 2)
    ]
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    ops = torch.ops.torchweave
    calls: dict[str, Callable[[int, int], Any]] = {
        "quant 4096": lambda i, group: ops.fp8_quant(x[i], group),
        "norm": lambda i, group: ops.add_rms_norm(x[i], x[i - 1], weight, 1e-5),
        "norm+quant": lambda i, group: ops.add_rms_norm_fp8(x[i], x[i - 1], weight, 1e-5, 0.0, False, group),
        "activation": lambda i, group: ops.gated_activation(wide[i % len(wide)], "silu"),
        "activation+quant": lambda i, group: ops.gated_activation_fp8(wide[i % len(wide)], "silu", group),
        "quant 14336": lambda i, group: ops.fp8_quant(wide[i % len(wide)][..., :14336], group),
    }
    for scheme, group in (("row", 0), ("block", GROUP)):
        for name, call in calls.items():
            us = measure(lambda i, call=call, group=group: call(i, group), count)
            found.append({"name": name, "tokens": tokens, "scheme": scheme, "kind": "fused", "us": round(us, 3)})
            print(f"{name:18}{tokens:>6} {scheme:6}{us:>9.2f} us", flush=True)
    return found


def table(results: list[dict[str, Any]]) -> str:
    """By shape, token count and scheme: microseconds of bf16, the library, the best and the chosen kernel."""
    lines = [
        f"{'shape':10}{'T':>6} {'scheme':6}{'bf16':>9}{'scaled_mm':>10}{'best':>9}{'chosen':>9}"
        f"{'x bf16':>8}{'GB/s':>7}{'TFLOPS':>8}  best is"
    ]
    timed = [row for row in results if "us" in row]
    for name, tokens in dict.fromkeys((row["name"], row["tokens"]) for row in timed):
        here = [row for row in timed if (row["name"], row["tokens"]) == (name, tokens)]
        base = next(row["us"] for row in here if row["scheme"] == "bf16")
        for scheme in ("row", "block"):
            rows = [row for row in here if row["scheme"] == scheme]
            if not rows:
                continue
            best = min(rows, key=lambda row: row["us"])
            library = next((row["us"] for row in rows if row["kind"] == "scaled_mm"), float("nan"))
            chosen = next((row["us"] for row in rows if row["chosen"]), float("nan"))
            times = f"{base:>9.1f}{library:>10.1f}{best['us']:>9.1f}{chosen:>9.1f}{base / best['us']:>8.2f}"
            lines.append(
                f"{name:10}{tokens:>6} {scheme:6}{times}"
                f"{best['gb_per_s']:>7.0f}{best['tflops']:>8.0f}  {best['kind']} {best['config'] or ''}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    parser.add_argument("--part", choices=["products", "fused", "all"], default="all")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 256, 2048])
    parser.add_argument(
        "--seconds", type=float, default=200, help="time limit of the search over candidates, in seconds"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    results: list[dict[str, Any]] = []
    if arguments.part != "fused":
        begin = time.monotonic()
        compile_all({SHAPES[name][1] for name in arguments.shapes}, arguments.tokens)
        print(f"kernels built in {time.monotonic() - begin:.1f} s", flush=True)
    deadline = time.monotonic() + arguments.seconds
    if arguments.part != "products":
        for tokens in arguments.tokens:
            results += fused(tokens)
    products: list[dict[str, Any]] = []
    for name in arguments.shapes if arguments.part != "fused" else ():
        product = Product(name, *SHAPES[name])
        for tokens in arguments.tokens:
            products += product.rows(tokens, deadline)
        del product
    if products:
        print(table(products), flush=True)
    results += products
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "cold_bytes": COLD_BYTES, "results": results,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
