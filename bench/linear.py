"""Products of few tokens on a GPU: the BLAS against the project's kernels, with what a decoder layer has around each product.

    python bench/linear.py --json bench/results/linear_h100_202611.json [--models 1b 8b] [--tokens 1 2 4] [--dtype float16]

Each candidate is one CUDA graph that runs on as many distinct weights as make 256 MB, so that every weight comes from memory and
not from a cache; the graphs of all candidates of a line are replayed in turn (torchweave/compile/tuning/measure.py). The first
is the product by cuBLAS with kernels of their own around it, against which every other is checked and measured. With
`dependent`, consecutive calls are dependent launches of one another. The JSON holds every candidate; the table the best of a kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from torchweave.compile.tuning.measure import GraphClock, copies_for
from torchweave.ops.linear import Around, LinearConfig, run_apart

TOKENS = [1, 2, 4, 8, 16, 32, 48, 64]


@dataclass(frozen=True)
class Subject:
    """One product of a model and what is around it: n: RMSNorm before, g: silu gate behind, r: residual added behind."""

    name: str
    outputs: int
    width: int
    around: str = ""

    def fused(self, tokens: int, dtype: torch.dtype, device: str = "cuda") -> Around:
        found = Around()
        if "n" in self.around:
            found = replace(found, norm=torch.rand(self.width, device=device, dtype=dtype), eps=1e-5)
        if "g" in self.around:
            found = replace(found, activation="silu")
        if "r" in self.around:
            found = replace(found, residual=torch.randn(tokens, self.outputs, device=device, dtype=dtype))
        return found

    def out(self, tokens: int, dtype: torch.dtype, rows: int | None = None) -> Tensor:
        outputs = rows or self.outputs
        return torch.empty(tokens, outputs // 2 if "g" in self.around else outputs, device="cuda", dtype=dtype)


SUBJECTS = {
    "1b": [
        Subject("qkv", 3072, 2048, "n"), Subject("o", 2048, 2048, "r"), Subject("gate_up", 16384, 2048, "ng"),
        Subject("down", 2048, 8192, "r"), Subject("head", 128256, 2048),
    ],
    "8b": [
        Subject("qkv", 6144, 4096, "n"), Subject("o", 4096, 4096, "r"), Subject("gate_up", 28672, 4096, "ng"),
        Subject("down", 4096, 14336, "r"), Subject("head", 128256, 4096),
    ],
}  # fmt: skip


def candidates(tokens: int, subject: Subject) -> list[LinearConfig]:
    """The configurations that are tried at a number of tokens."""
    plain: list[LinearConfig] = []
    if tokens == 1:
        shapes = [(2, 2048, 4, 4), (4, 1024, 4, 4), (4, 2048, 4, 2), (8, 1024, 4, 2), (8, 1024, 8, 2)]
        plain += [LinearConfig("row", *shape) for shape in shapes]
    elif tokens <= 4:
        shapes = [(4, 1024, 4, 2), (2, 1024, 4, 2), (8, 512, 4, 2)]
        plain += [LinearConfig("row", *shape) for shape in shapes]
    if 2 < tokens <= 16:
        shapes = [(16, 64, 4, 4), (16, 128, 4, 3), (16, 64, 8, 3), (32, 64, 4, 4)]
        plain += [LinearConfig("split", *shape) for shape in shapes]
        plain += [LinearConfig("dot", 64, 128, 4, 4)]
    elif tokens > 16:
        shapes = [(16, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 4)]
        plain += [LinearConfig("split", *shape) for shape in shapes]
        plain += [
            LinearConfig("dot", 64, 128, 4, 4),
            LinearConfig("dot", 64, 64, 4, 6),
            LinearConfig("dot", 128, 64, 8, 4),
        ]
    modes = [(1, 0), (1, 4096), (2, 4096)] if tokens <= 2 else [(1, 0), (1, 4096)]
    found = [replace(each, dependent=dependent, ahead=ahead) for each, (dependent, ahead) in product(plain, modes)]
    found += plain if tokens <= 2 else plain[:1] + plain[-1:]
    if "n" not in subject.around or tokens <= 4:
        return found
    apart = [replace(each, norm_apart=True) for each in found if each.dependent < 2]
    return apart if tokens > 16 else found + apart


def padded(tokens: int, config: LinearConfig) -> int:
    """Kernels differ by configuration and padded number of tokens, not by the tokens themselves."""
    return max(1 if config.kernel == "row" else 8, 1 << (tokens - 1).bit_length())


def build_all(subjects: list[Subject], tokens: list[int], dtype: torch.dtype) -> None:
    """Build every kernel on all cores before anything is timed: launches on small weights with the real widths."""

    def build(job: tuple[LinearConfig, int, Subject]) -> None:
        config, count, subject = job
        x = torch.zeros(count, subject.width, device="cuda", dtype=dtype)
        small = replace(subject, outputs=256)
        try:
            w = torch.zeros(256, subject.width, device="cuda", dtype=dtype)
            config.run(x, w, small.out(count, dtype), small.fused(count, dtype))
        except Exception as error:
            print(f"{config} does not build: {str(error)[:120]}", flush=True)

    jobs = {
        (config, padded(count, config), replace(subject, name="", outputs=0))
        for subject in subjects
        for count in tokens
        for config in candidates(count, subject)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, sorted(jobs, key=repr)))
    torch.cuda.synchronize()


def compare(
    model: str, subject: Subject, tokens: list[int], dtype: torch.dtype, deadline: float
) -> list[dict[str, Any]]:
    """All candidates of one product at each number of tokens; stops early, and says so, at the deadline."""
    size = subject.outputs * subject.width * dtype.itemsize
    copies = copies_for(size)
    shape = (subject.outputs, subject.width)
    distinct = min(copies, -(-(256 << 20) // size) + 1)
    weights = [torch.empty(shape, device="cuda", dtype=dtype).normal_(std=subject.width**-0.5) for _ in range(distinct)]
    results = []
    for count in tokens:
        if time.monotonic() > deadline:
            print(f"out of time at {model} {subject.name}, {count} tokens", flush=True)
            return results
        x = torch.randn(count, subject.width, device="cuda", dtype=dtype)
        around, out = subject.fused(count, dtype), subject.out(count, dtype)
        expected = run_apart(x, weights[0], around).float()
        configs, calls = {}, {"apart": lambda i, x=x, around=around: run_apart(x, weights[i % distinct], around)}
        for config in candidates(count, subject):
            name = repr(config)
            try:
                config.run(x, weights[0], out, around)
                torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
            except Exception as error:
                print(f"{model} {subject.name} {count}: {config}: {str(error)[:300]}", flush=True)
                continue
            configs[name] = config
            calls[name] = lambda i, c=config, x=x, out=out, around=around: c.run(x, weights[i % distinct], out, around)
        timings = GraphClock(failed=lambda name, error: print(name, str(error)[:200], flush=True)).time(calls, copies)
        for name, timing in timings.items():
            config = configs.get(name)
            results.append({
                "name": f"{model} {subject.name}", "outputs": subject.outputs, "width": subject.width, "around": subject.around,
                "tokens": count, "config": asdict(config) if config else None, "us": round(timing.microseconds, 3),
                "noise": round(timing.noise, 3), "gb_per_s": round(size / timing.microseconds / 1e3, 1),
            })  # fmt: skip
    return results


def kind(config: dict[str, Any] | None) -> str:
    if config is None:
        return "apart"
    extra = ("+pdl", "+PDL")[config["dependent"] - 1] if config["dependent"] else ""
    return config["kernel"] + extra + ("+ahead" if config["ahead"] else "") + ("/norm" if config["norm_apart"] else "")


def table(results: list[dict[str, Any]]) -> str:
    """One line for each product and number of tokens: the BLAS, and the best of each kind as microseconds and gain."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every measurement")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=230, help="stop trying candidates after this long")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    started = time.monotonic()
    dtype = getattr(torch, arguments.dtype)
    subjects = [subject for model in arguments.models for subject in SUBJECTS[model]]
    build_all(subjects, arguments.tokens, dtype)
    print(f"kernels built in {time.monotonic() - started:.1f} s", flush=True)
    results = []
    for model in arguments.models:
        for subject in SUBJECTS[model]:
            results += compare(model, subject, arguments.tokens, dtype, started + arguments.seconds)
            torch.cuda.empty_cache()
    print(table(results))
    print(f"{len(results)} measurements in {time.monotonic() - started:.1f} s")
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "dtype": arguments.dtype, "results": results,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
