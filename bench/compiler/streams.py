"""MoE layers on one and on several streams, in one run: gain of automatic multi-stream execution on a GPU.

    python bench/compiler/streams.py [--models qwen2-moe-a2.7b] [--tokens 1 8 32] [--fx] \
        --json bench/results/streams_h100_202611.json

Each model is a few layers of its shape with random weights, split at an attention that only copies, so the piece between two
attentions is measured: output projection, norms, router, routed and shared experts, q/k/v with their norms. It is compiled once per
number of streams; each token count is a CUDA graph, and the graphs are replayed in turn. The weights exceed every cache. The JSON
holds microseconds per layer, the ratio to one stream, and the simulator's prediction.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import torchweave.ops.moe.experts  # noqa: F401  (defines torchweave::experts)
from torchweave.compiler import compile_graph
from torchweave.compiler.runtime.cuda_graphs import GraphPool, record
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

REPLAYS = 40


@dataclass(frozen=True)
class Shape:
    """Shape of a layer. `shared`: width of the shared expert, 0: none; `weighed`: scaled by a gate; `normed`: norms of q and k."""

    hidden: int
    experts: int
    inner: int
    top_k: int
    shared: int = 0
    weighed: bool = False
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    normed: bool = False
    layers: int = 4


SHAPES = {
    "qwen2-moe-a2.7b": Shape(2048, 60, 1408, 4, shared=5632, weighed=True),
    "qwen2-moe-a14b": Shape(3584, 64, 2560, 8, shared=20480, weighed=True, heads=28, kv_heads=4, layers=2),
    "deepseek-v2-lite": Shape(2048, 64, 1408, 6, shared=2816),
    "qwen3-30b-a3b": Shape(2048, 128, 768, 8, heads=32, kv_heads=4, normed=True),
}


@torch.library.custom_op("bench::attend", mutates_args=("out",))
def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Placeholder of attention that reads q, k and v in almost no time."""
    out.copy_(q)
    out[:, : k.shape[1]].add_(k).add_(v)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None: ...


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
        linear = lambda rows, columns: nn.Linear(columns, rows, bias=False)  # noqa: E731
        self.q, self.k, self.v = linear(shape.heads * shape.head_dim, hidden), linear(kv, hidden), linear(kv, hidden)
        self.o, self.router = linear(hidden, shape.heads * shape.head_dim), linear(shape.experts, hidden)
        self.up_experts = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner, hidden))
        self.down_experts = nn.Parameter(torch.empty(shape.experts, hidden, shape.inner))
        self.norm_1, self.norm_2 = (nn.Parameter(torch.empty(hidden)) for _ in range(2))
        if shape.normed:
            self.q_norm, self.k_norm = (nn.Parameter(torch.empty(shape.head_dim)) for _ in range(2))
        if shape.shared:
            self.gate, self.up = linear(shape.shared, hidden), linear(shape.shared, hidden)
            self.down = linear(hidden, shape.shared)
        if shape.weighed:
            self.weigh = linear(1, hidden)

    def forward(self, residual: Tensor) -> Tensor:
        shape = self.shape
        x = norm(residual, self.norm_1)
        q = self.q(x).view(-1, shape.heads, shape.head_dim)
        k, v = (each(x).view(-1, shape.kv_heads, shape.head_dim) for each in (self.k, self.v))
        if shape.normed:
            q, k = norm(q, self.q_norm), norm(k, self.k_norm)
        out = torch.empty_like(q)
        torch.ops.bench.attend(q, k, v, out)
        residual = residual + self.o(out.flatten(1))
        x = norm(residual, self.norm_2)
        weight, index = torch.topk(F.softmax(self.router(x), -1, dtype=torch.float), shape.top_k, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        total = torch.ops.torchweave.experts(x, index, weight, self.up_experts, self.down_experts, None, None, "silu")
        if shape.shared:
            shared = self.down(F.silu(self.gate(x)) * self.up(x))
            total = total + (F.sigmoid(self.weigh(x)) * shared if shape.weighed else shared)
        return residual + total


def norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = Layers(shape).to(torch.bfloat16).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1)
    return module


def compare(name: str, shape: Shape, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every token count of a model on every number of streams."""
    module, device = model(shape), torch.device("cuda", torch.cuda.current_device())
    example = {"x": torch.zeros(23, shape.hidden, device=device, dtype=torch.bfloat16)}
    forwards, events = {}, {}
    for streams in (1, *arguments.streams):
        report = Report(show=False)
        config = TorchCompileConfig(enable_inductor=not arguments.fx, max_num_streams=streams)
        forwards[streams] = compile_graph(
            module, example, {"x": {0: "T"}}, boundary_ops={"bench::attend"}, config=config, report=report
        )
        kept = [event for event in report.select("streams") if event["kept"]]
        events[streams] = [{key: event[key] for key in ("piece", "serial", "makespan", "why")} for event in kept]
    results = []
    for tokens in arguments.tokens:
        x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        pool = GraphPool(device)
        recordings = {
            streams: record(partial(run, forward, x), call_op, capture_boundary_ops=True, pool=pool)
            for streams, forward in forwards.items()
        }
        times = measure({streams: recording.replay for streams, recording in recordings.items()})
        outputs = {streams: recording.replay().clone() for streams, recording in recordings.items()}
        for streams, found in times.items():
            torch.testing.assert_close(outputs[streams], outputs[1], rtol=5e-2, atol=5e-2)
            results.append({
                "model": name, "tokens": tokens, "streams": streams, "us_per_layer": round(found / shape.layers, 2),
                "ratio": round(found / times[1], 4), "bit_equal": bool(outputs[streams].equal(outputs[1])),
                "kept": events[streams],
            })  # fmt: skip
            row = f"{name:18} T={tokens:<4} streams={streams} {found / shape.layers:8.2f} us per layer   {found / times[1]:.3f}"
            print(row, flush=True)
    return results


def run(forward: Any, x: Tensor, boundary: Any) -> Tensor:
    return forward(boundary, x)


def measure(replays: dict[int, Any]) -> dict[int, float]:
    """Median microseconds per replay of each graph; graphs alternate, so that clock drift affects all."""
    times: dict[int, list[float]] = {streams: [] for streams in replays}
    for _ in range(REPLAYS):
        for streams, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times[streams].append(begin.elapsed_time(end) * 1e3)
    return {streams: median(found) for streams, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument(
        "--streams", nargs="+", type=int, default=[2], help="numbers of streams, each compared with one stream"
    )
    parser.add_argument("--layers", type=int, help="number of layers of each model")
    parser.add_argument(
        "--fx", action="store_true", help="run pieces as plain FX code instead of building them with Inductor"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    started, results = time.monotonic(), []
    for name in arguments.models:
        shape = SHAPES[name]
        results += compare(name, replace(shape, layers=arguments.layers or shape.layers), arguments)
        torch.cuda.empty_cache()
    print(f"{len(results)} measurements in {time.monotonic() - started:.1f} s")
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "built_by": "fx" if arguments.fx else "inductor", "replays": REPLAYS, "results": results,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
