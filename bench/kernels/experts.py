"""Routed experts on a GPU: torch's grouped matmul against Torchweave's kernels, in a CUDA graph with cold weights.

    python bench/kernels/experts.py --json bench/results/experts_h100_202611.json [--model mixtral-8x7b] [--tokens 1 2 4]
    python bench/kernels/experts.py --weights mxfp4 --model gpt-oss-20b      # or fp8, fp8_per_block, int4, nvfp4

A sample replays a graph that runs the op on several layers' weights with different random routings, so that the experts come from
memory instead of a cache. `torch` is the plain path: sort, gather, two grouped matmuls, weighted sum. Candidates vary the first
product, then the second with the best first, then dependent launch or lines fetched ahead; each must agree with `torch` before it
is timed. GB/s counts the weights of the distinct chosen experts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.models.weights.int_linear import MXFP4, NVFP4, IntScheme, quantize_int_weight
from torchweave.ops.kernels.moe.packing import PLAIN, Packing
from torchweave.ops.moe.experts import ExpertForm, ExpertsCall, activate
from torchweave.ops.moe.fused_experts import GemmConfig, Grouped, Rows, Strategy, Tiles, choose, run
from torchweave.ops.quant.fp8 import GROUP, scale_from_amax, to_fp8
from torchweave.ops.quant.int_linear import dequantize_int

BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_per_block": 1.0,
    "mxfp4": 17 / 32,
    "int4": 0.5 + 2 / 128,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of a weight with its scales."""
SCHEMES = {"int4": IntScheme(), "mxfp4": MXFP4, "nvfp4": NVFP4}


@dataclass(frozen=True)
class Model:
    """One layer's experts; `shared`: the last is a shared one, the last of the top_k of each token."""

    num_experts: int
    width: int
    inner: int
    top_k: int
    form: ExpertForm = field(default_factory=ExpertForm)
    biased: bool = False
    shared: bool = False


MODELS = {
    "qwen3-30b-a3b": Model(128, 2048, 768, 8),
    "qwen3.5-35b-a3b": Model(257, 2048, 512, 9, shared=True),
    "mixtral-8x7b": Model(8, 4096, 14336, 2),
    "gpt-oss-20b": Model(
        32, 2880, 2880, 4, ExpertForm(interleaved=True, transposed=True, alpha=1.702, limit=7.0), biased=True
    ),
}
COLD_BYTES = 1 << 30
REPLAYS = 8

ROWS_UP = [
    (2, 2048, 4, 1),
    (4, 2048, 8, 1),
    (1, 2048, 4, 1),
    (2, 1024, 4, 2),
    (4, 1024, 4, 2),
    (2, 1024, 2, 2),
    (4, 1024, 2, 2),
    (4, 512, 4, 4),
    (8, 256, 4, 4),
]
ROWS_DOWN = [
    (2, 128, 4, 3),
    (2, 128, 4, 2),
    (2, 128, 2, 3),
    (1, 256, 4, 3),
    (2, 256, 4, 2),
    (4, 128, 4, 2),
    (1, 512, 4, 2),
    (4, 64, 4, 4),
    (4, 256, 8, 3),
    (2, 512, 8, 1),
]
TILES_UP = [
    (32, 128, 4, 4),
    (32, 64, 4, 5),
    (64, 64, 4, 4),
    (16, 128, 4, 5),
    (16, 256, 4, 3),
    (32, 128, 4, 3),
    (64, 128, 8, 4),
]
TILES_DOWN = [
    (64, 128, 4, 4),
    (64, 64, 4, 5),
    (32, 128, 4, 5),
    (32, 256, 4, 3),
    (128, 64, 4, 4),
    (64, 128, 4, 3),
    (128, 128, 8, 3),
]
NARROW_UP = [
    (32, 128, 2, 4),
    (32, 128, 2, 3),
    (32, 128, 2, 5),
    (16, 128, 2, 4),
    (16, 128, 2, 6),
    (16, 128, 1, 4),
    (32, 128, 1, 4),
    (64, 128, 2, 3),
]
NARROW_DOWN = [(2 * n, *rest) for n, *rest in NARROW_UP]
NARROW_WORDS_UP = [
    *NARROW_UP[:6],
    (32, 256, 2, 3),
    (32, 256, 2, 4),
    (16, 256, 2, 4),
    (16, 256, 1, 4),
    (32, 256, 1, 3),
    (8, 256, 1, 4),
]
NARROW_WORDS_DOWN = [(2 * n, *rest) for n, *rest in NARROW_WORDS_UP]
WORDS_UP = [
    (4, 2048, 1, 1),
    (2, 2048, 1, 1),
    (4, 1024, 1, 1),
    (2, 1024, 1, 1),
    (4, 1024, 2, 1),
    (4, 2048, 2, 1),
    (2, 4096, 4, 1),
]
WORDS_DOWN = [
    (4, 4096, 4, 1),
    (2, 4096, 4, 1),
    (8, 4096, 4, 1),
    (4, 2048, 2, 1),
    (4, 4096, 2, 1),
    (4, 8192, 4, 1),
    (4, 8192, 8, 1),
]
WIDE_UP = [(64, 64, 8, 3), (64, 64, 8, 4), (64, 128, 8, 3), (128, 64, 8, 3)]
WIDE_DOWN = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (64, 64, 4, 4)]


def starts(
    tokens: int, model: Model, quantized: bool, words: bool
) -> Iterator[tuple[Rows | Tiles, list[GemmConfig], list[GemmConfig]]]:
    """Start of the search for a token count: a method, and the candidates of its two products; words: of packed weights."""

    def products(options: list[tuple[int, int, int, int]]) -> list[GemmConfig]:
        return [GemmConfig(*option) for option in options]

    ups, downs = (products(WORDS_UP), products(WORDS_DOWN)) if words else (products(ROWS_UP), products(ROWS_DOWN))
    if tokens <= 4 and not model.form.transposed:
        yield Rows(ups[0], downs[0]), ups, downs
    mean = tokens * model.top_k / model.num_experts
    if mean <= 8 and quantized:
        up, down = (NARROW_WORDS_UP, NARROW_WORDS_DOWN) if words else (NARROW_UP, NARROW_DOWN)
        ups, downs = products(up), products(down)
        yield Tiles(ups[0], downs[0], 8, dependent=True), ups, downs
    for block_m, up, down, low, high in (
        (16, TILES_UP, TILES_DOWN, 0, 16), (32, TILES_UP, TILES_DOWN, 4, 32), (64, WIDE_UP, WIDE_DOWN, 16, 1e9),
        (128, WIDE_UP, WIDE_DOWN, 64, 1e9),
    ):  # fmt: skip
        if low <= mean <= high:
            ups, downs = products(up), products(down)
            yield Tiles(ups[0], downs[0], block_m), ups, downs


def by_torch(call: ExpertsCall) -> None:
    """The reference path of torch operations."""
    experts, order = torch.sort(call.index.reshape(-1).to(torch.int32), stable=True)
    every = torch.arange(call.num_experts, device=call.x.device, dtype=torch.int32)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    up, down = (w if call.form.transposed else w.transpose(1, 2) for w in (call.up, call.down))
    h = torch._grouped_mm(call.x[order // call.top_k], up, offs=ends)
    h = h if call.up_bias is None else h + call.up_bias[experts]
    y = torch._grouped_mm(activate(h, call.form).contiguous(), down, offs=ends)
    y = y if call.down_bias is None else y + call.down_bias[experts]
    weighted = torch.empty_like(y, dtype=torch.float32)
    weighted[order] = y.float() * call.weight.reshape(-1)[order, None].float()
    call.out.copy_(weighted.view(call.num_tokens, call.top_k, -1).sum(dim=1))


def make_layers(model: Model) -> list[ExpertsCall]:
    """Weights of COLD_BYTES in total, at least two layers."""
    columns, biased = 2 * model.inner, model.biased
    transposed = model.form.transposed
    up = (model.width, columns) if transposed else (columns, model.width)
    down = (model.inner, model.width) if transposed else (model.width, model.inner)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(model.num_experts, *shape, device="cuda", dtype=torch.bfloat16).normal_(std=scale)

    size = 2 * model.num_experts * 3 * model.width * model.inner
    none = torch.empty(0, model.top_k, device="cuda")
    return [
        ExpertsCall(
            none, none, none, random(*up, scale=model.width**-0.5), random(*down, scale=model.inner**-0.5),
            random(columns) if biased else None, random(model.width) if biased else None, none, model.form,
            shared=model.shared,
        )
        for _ in range(max(2, -(-COLD_BYTES // size)))
    ]  # fmt: skip


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor, Packing]:
    """A weight `[E, rows, width]` as `torchweave::quantized_experts` takes it, its scales, its values in bfloat16, and the rest."""
    if kind not in SCHEMES:
        return (*in_fp8(weight, kind), PLAIN)
    scheme = SCHEMES[kind]
    parts = [quantize_int_weight(each, scheme) for each in weight]
    values = [
        dequantize_int(each.w, each.scale, None, weight.shape[2], each.group, torch.bfloat16, each.row_scale)
        for each in parts
    ]
    rows = torch.stack([each.row_scale for each in parts]) if kind == "nvfp4" else None
    w, scale = torch.stack([each.w for each in parts]), torch.stack([each.scale for each in parts])
    return w, scale, torch.stack(values), Packing(None, rows, scheme.group)


def in_fp8(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same of FP8."""
    if kind == "fp8":
        scale = scale_from_amax(weight.abs().amax(2, keepdim=True))
        wide = scale
    else:
        blocks = weight.unflatten(2, (-1, GROUP)).unflatten(1, (-1, GROUP))
        scale = scale_from_amax(blocks.abs().amax((2, 4)))
        wide = scale.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)
    q = to_fp8(weight, wide)
    return q, scale, (q.float() * wide).to(torch.bfloat16)


def quantized_layer(layer: ExpertsCall, kind: str) -> tuple[ExpertsCall, ExpertsCall]:
    """A layer in a format, rows of outputs first, and the same with the values of its weights."""
    ups, downs = (
        quantized(w.transpose(1, 2).contiguous() if layer.form.transposed else w, kind) for w in (layer.up, layer.down)
    )
    form = replace(layer.form, transposed=False)
    plain = replace(layer, up=ups[2], down=downs[2], form=form)
    scales = {"up_scale": ups[1], "down_scale": downs[1], "up_packing": ups[3], "down_packing": downs[3]}
    return replace(plain, up=ups[0], down=downs[0], **scales), plain


def make_calls(layers: list[ExpertsCall], model: Model, tokens: int) -> list[ExpertsCall]:
    """Calls on all layers with different routings: at least COLD_BYTES or 8 calls."""
    count = max(len(layers), 8 if tokens <= 64 else 4)
    calls = []
    for number in range(count):
        scores = torch.rand(tokens, model.num_experts, device="cuda")
        if model.shared:
            scores[:, -1] = -1.0
        weight, index = scores.topk(model.top_k)
        if model.shared:
            index[:, -1] = model.num_experts - 1
        x = torch.randn(tokens, model.width, device="cuda", dtype=torch.bfloat16)
        weight = (weight / weight.sum(-1, keepdim=True)).to(torch.bfloat16)
        layer = layers[number % len(layers)]
        calls.append(replace(layer, x=x, index=index, weight=weight, out=torch.empty_like(x)))
    return calls


def measure(execute: Callable[[ExpertsCall], None], calls: list[ExpertsCall]) -> float:
    """Microseconds per call: the median replay of a graph of all calls, over their number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        execute(calls[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            execute(call)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(second) for first, second in pairwise(marks))
    return times[len(times) // 2] * 1e3 / len(calls)


class Bench:
    """Measurements of one model's experts."""

    def __init__(self, name: str, deadline: float, weights: str) -> None:
        self.name, self.model, self.deadline, self.weights = name, MODELS[name], deadline, weights
        self.layers = self.plain = make_layers(self.model)
        if weights != "bfloat16":
            self.model = replace(self.model, form=replace(self.model.form, transposed=False))
            self.layers, self.plain = map(
                list, zip(*(quantized_layer(layer, weights) for layer in self.layers), strict=True)
            )
        self.results: list[dict] = []

    def at(self, tokens: int) -> None:
        """All candidates for a token count."""
        plain = make_calls(self.plain, self.model, tokens)
        pairs = zip(plain, (self.layers[at % len(self.layers)] for at in range(len(plain))), strict=True)
        calls = [
            replace(layer, x=c.x, index=c.index, weight=c.weight, out=torch.empty_like(c.out)) for c, layer in pairs
        ]
        self._record(tokens, plain, "torch", by_torch, None)
        by_torch(plain[0])
        right = plain[0].out.float()
        chosen = self._chosen(tokens)
        for strategy in dict.fromkeys((Grouped(), chosen) if self.weights == "bfloat16" else (chosen,)):
            self._try(tokens, calls, right, strategy)
        for strategy, ups, downs in self._starts(tokens):
            strategy = self._best(tokens, calls, right, [replace(strategy, up=up) for up in ups])
            if strategy is not None:
                strategy = self._best(tokens, calls, right, [replace(strategy, down=down) for down in downs])
            if isinstance(strategy, Tiles) and strategy.dependent:
                up, down = replace(strategy.up, ahead=4), replace(strategy.down, ahead=4)
                self._best(tokens, calls, right, [replace(strategy, down=down), replace(strategy, up=up, down=down)])
            elif strategy is not None:
                self._try(tokens, calls, right, replace(strategy, dependent=True))
            if isinstance(strategy, Rows) and self.model.shared:
                self._try(tokens, calls, right, replace(strategy, dependent=True, early=True))
                if isinstance(chosen, Rows):
                    self._try(tokens, calls, right, replace(chosen, early=False))

    def _starts(self, tokens: int) -> Iterator[tuple[Rows | Tiles, list[GemmConfig], list[GemmConfig]]]:
        """`starts`, without tiles of several scales an iteration."""
        for strategy, ups, downs in starts(tokens, self.model, self.weights != "bfloat16", self.weights in SCHEMES):
            if self.weights == "fp8_per_block" and isinstance(strategy, Tiles):
                ups, downs = ([each for each in given if each.block_k <= GROUP] for given in (ups, downs))
            yield strategy, ups, downs

    def _chosen(self, tokens: int) -> Strategy:
        shared = self.model.shared
        shape = (self.model.num_experts - shared, self.model.width, self.model.inner)
        weights = None if self.weights == "bfloat16" else self.weights
        top_k, transposed = self.model.top_k - shared, self.model.form.transposed
        return choose(tokens, top_k, shape, torch.bfloat16, transposed, weights, shared)

    def _best(self, tokens: int, calls: list[ExpertsCall], right: Tensor, ways: list[Strategy]) -> Strategy | None:
        timed = [
            (us, index)
            for index, strategy in enumerate(ways)
            if (us := self._try(tokens, calls, right, strategy)) is not None
        ]
        return ways[min(timed)[1]] if timed else None

    def _try(self, tokens: int, calls: list[ExpertsCall], right: Tensor, strategy: Strategy) -> float | None:
        """Microseconds; None if the method fails, disagrees or time is up."""
        if time.monotonic() > self.deadline:
            return None
        try:
            calls[0].out.fill_(torch.nan)
            run(calls[0], strategy)
            torch.testing.assert_close(calls[0].out.float(), right, rtol=3e-2, atol=3e-2)
            return self._record(
                tokens, calls, type(strategy).__name__.lower(), lambda call: run(call, strategy), strategy
            )
        except Exception as error:  # e.g. too much shared memory
            self.results.append(
                {"model": self.name, "tokens": tokens, "way": asdict(strategy), "error": str(error)[:300]}
            )
            return None

    def _record(
        self,
        tokens: int,
        calls: list[ExpertsCall],
        kind: str,
        execute: Callable[[ExpertsCall], None],
        strategy: Strategy | None,
    ) -> float:
        us = measure(execute, calls)
        read = sum(call.index.unique().numel() for call in calls) / len(calls)
        size = read * 3 * self.model.width * self.model.inner * (2 if kind == "torch" else BYTES[self.weights])
        self.results.append({
            "model": self.name, "tokens": tokens, "kind": kind, "us": round(us, 2), "gb_per_s": round(size / us / 1e3, 1),
            "experts_read": round(read, 1), "way": None if strategy is None else asdict(strategy),
            "chosen": strategy == self._chosen(tokens),
        })  # fmt: skip
        return us

    def build_kernels(self, tokens: list[int]) -> None:
        """Compile every kernel on all cores before timing."""
        jobs = {}
        for count in tokens:
            jobs.setdefault(str(self._chosen(count)), (self._chosen(count), count))
            for strategy, ups, downs in self._starts(count):
                for number in range(max(len(ups), len(downs))):
                    one = replace(strategy, up=ups[number % len(ups)], down=downs[number % len(downs)])
                    jobs.setdefault(str(one), (one, count))

        def build(job: tuple[Strategy, int]) -> None:
            strategy, count = job
            try:
                run(make_calls(self.layers, self.model, min(count, 64))[0], strategy)
            except Exception as error:
                print(f"{strategy}: {str(error)[:200]}", flush=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(build, jobs.values()))
        torch.cuda.synchronize()


def table(results: list[dict]) -> str:
    """A row per token count: torch's path, and the best of each kind as microseconds, gain and GB/s."""
    lines = []
    for model, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in results if "us" in r):
        rows = [r for r in results if (r["model"], r["tokens"]) == (model, tokens) and "us" in r]
        base = rows[0]
        parts = [f"{model} T={tokens:<5} torch {base['us']:8.1f} us {base['gb_per_s']:6.0f} GB/s"]
        for kind in dict.fromkeys(r["kind"] for r in rows[1:]):
            best = min((r for r in rows if r["kind"] == kind), key=lambda r: r["us"])
            how = {
                key: tuple(value.values()) if isinstance(value, dict) else value
                for key, value in (best["way"] or {}).items()
            }
            parts.append(
                f"    {kind:8} {best['us']:8.1f} us {best['gb_per_s']:6.0f} GB/s ({base['us'] / best['us']:.2f}x) {how}"
            )
        parts += [f"    chosen   {r['us']:8.1f} us {r['kind']}" for r in rows if r["chosen"]]
        lines += parts
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--weights", choices=list(BYTES), default="bfloat16", help="format of the experts")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 512, 4096])
    parser.add_argument(
        "--seconds", type=float, default=120, help="time limit of the search over candidates, in seconds"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    started = time.monotonic()
    bench = Bench(arguments.model, started + arguments.seconds, arguments.weights)
    bench.build_kernels(arguments.tokens)
    print(f"kernels built in {time.monotonic() - started:.1f} s", flush=True)
    for tokens in arguments.tokens:
        bench.at(tokens)
    print(table(bench.results))
    failed = [r for r in bench.results if "error" in r]
    print("\n".join(f"failed: T={r['tokens']} {r['way']}: {r['error']}" for r in failed))
    print(f"{len(bench.results)} measurements in {time.monotonic() - started:.1f} s")
    if arguments.json:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        facts = {
            "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "cold_bytes": COLD_BYTES, "results": bench.results,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
