"""Gain of rank fusions and user buffers on a decoder layer, by token count, in one run.

    python bench/compiler/rank_passes.py --ranks 2 --json bench/results/rank_passes_2x_h200_202611.json [--shape llama-8b] [--fp8]

Each form compiles the same layers (output projection, MLP, two norms; attention is a copy) with different passes: separate
collectives, fused, with user buffers. CUDA graphs of all forms are replayed in turn; a time is the median over rounds of the
slowest rank's, in microseconds per layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.compiler import CompiledGraph, compile_graph
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.distributed.process_groups import (
    ProcessGroupCommunicator,
    ProcessGroups,
    create_rendezvous_store,
    destroy_process_groups,
    init_process_groups,
    join_rendezvous_store,
)
from torchweave.distributed.symmetric_memory import enable_symmetric_memory
from torchweave.ops.collectives.op import register_communicator
from torchweave.ops.quant.fp8 import PER_TOKEN, quantize
from torchweave.ops.registry import define
from torchweave.report import Report

SHAPES = {"llama-8b": (4096, 14336, 6), "llama-70b": (8192, 28672, 3), "tiny": (64, 128, 2)}
"""Width of the hidden state and the MLP, and a number of layers larger than any cache."""
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROUNDS = 15
APART = ("all_reduce_norm", "userbuffers_convert", "userbuffers_prologue")
FORMS = {
    "apart": {"disabled_passes": APART},
    "fused": {"enable_userbuffers": False},
    "userbuffers_prologue": {},
}
ops = torch.ops.torchweave


@define("bench::attention", mutates=("out",), boundary=True)
def attention(x: Tensor, out: Tensor) -> None:
    """A boundary op between two layers."""
    out.copy_(x)


class Layer(nn.Module):
    """A rank's part of a layer from the output projection on, with random weights."""

    def __init__(self, width: int, inner: int, process_groups: ProcessGroups, fp8: bool) -> None:
        super().__init__()
        size, options = process_groups.tensor_parallel_size, {"device": process_groups.device, "dtype": torch.bfloat16}
        shapes = (width, width // size), (2 * inner // size, width), (width, inner // size), (width // size, width)
        self.fp8 = fp8
        for index, shape in enumerate(shapes):
            w = torch.randn(shape, **options) / shape[1] ** 0.5
            w, s = quantize(w, PER_TOKEN) if fp8 else (w, torch.ones(1, device=process_groups.device))
            self.register_buffer(f"w{index}", w)
            self.register_buffer(f"s{index}", s.flatten())
        self.register_buffer("n0", torch.ones(width, **options))
        self.register_buffer("n1", torch.ones(width, **options))

    def linear(self, x: Tensor, index: int) -> Tensor:
        w, s = getattr(self, f"w{index}"), getattr(self, f"s{index}")
        if not self.fp8:
            return F.linear(x, w)
        return ops.fp8_linear(*ops.fp8_quant(x, PER_TOKEN), w, s, None, torch.bfloat16)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        torch.ops.bench.attention(x, out)
        residual = residual + ops.all_reduce(self.linear(out, 0), "tp")
        gate, up = self.linear(ops.rms_norm(residual, self.n0, 1e-5), 1).chunk(2, -1)
        residual = residual + ops.all_reduce(self.linear(F.silu(gate) * up, 2), "tp")
        return self.linear(ops.rms_norm(residual, self.n1, 1e-5), 3), residual


class Layers(nn.Module):
    def __init__(self, width: int, inner: int, count: int, process_groups: ProcessGroups, fp8: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, inner, process_groups, fp8) for _ in range(count))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


def form(module: Layers, options: dict[str, Any], example: dict[str, Tensor]) -> CompiledGraph:
    config = TorchCompileConfig(compile_cache=False, enable_inductor=example["x"].is_cuda, **options)
    dynamic = {name: {0: "T"} for name in example}
    return compile_graph(
        module, example, dynamic, boundary_ops={"bench::attention"}, config=config, report=Report(show=False)
    )


def recorded(compiled_graph: CompiledGraph, given: list[Tensor]) -> Callable[[], Any]:
    """A graph replay on a GPU, a direct call on a CPU."""
    if not given[0].is_cuda:
        return lambda: compiled_graph(call_op, *given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compiled_graph(call_op, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        compiled_graph(call_op, *given)
    return graph.replay


def microseconds(process_groups: ProcessGroups, call: Callable[[], Any], repeats: int = 5) -> float:
    process_groups.barrier()
    call()  # synchronizes the ranks
    if process_groups.device == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) * 1e6 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def rank_main(rank: int, address: tuple[str, int], asked: argparse.Namespace, out: str) -> None:
    device = "cpu" if asked.cpu else f"cuda:{rank}"
    if not asked.cpu:
        torch.cuda.set_device(device)
    process_groups = init_process_groups(rank, asked.ranks, 1, device, join_rendezvous_store(address))
    register_communicator("tp", ProcessGroupCommunicator(process_groups.groups["tp"]))
    enable_symmetric_memory(process_groups, Report(show=False))
    width, inner, count = SHAPES[asked.shape]
    torch.manual_seed(rank)
    module = Layers(width, inner, count, process_groups, asked.fp8)

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(tokens, each, device=device).bfloat16() for each in (width // asked.ranks, width)]

    example = dict(zip(("x", "residual"), inputs(23), strict=True))
    forms = {name: form(module, options, example) for name, options in FORMS.items()}
    found = []
    for tokens in asked.tokens:
        given = inputs(tokens)
        calls = {name: recorded(compiled_graph, given) for name, compiled_graph in forms.items()}
        times = {
            name: [microseconds(process_groups, call) / count for _ in range(asked.rounds)]
            for name, call in calls.items()
        }
        mine = torch.tensor(list(times.values()))
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=process_groups.host)
        rounds = dict(zip(times, mine.tolist(), strict=True))
        found.append({"tokens": tokens, **{name: statistics.median(each) for name, each in rounds.items()},
                      "noise": max(statistics.pstdev(each) for each in rounds.values())})  # fmt: skip
        if rank == 0:
            print(", ".join(f"{key} {value:.1f}" for key, value in found[-1].items()), flush=True)
        calls.clear()  # NCCL cannot destroy its group while a graph holds one of its collectives
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    process_groups.barrier()
    destroy_process_groups(process_groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--fp8", action="store_true", help="FP8 linears with per-token scales")
    parser.add_argument("--cpu", action="store_true", help="run on CPUs over gloo, to check that it works")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    store, address = create_rendezvous_store("127.0.0.1")
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        mp.spawn(rank_main, (address, asked, out.name), nprocs=asked.ranks)
        results = json.loads(Path(out.name).read_text())
    del store
    if asked.json:
        gpu = "CPU" if asked.cpu else f"{asked.ranks} x {torch.cuda.get_device_name()}"
        facts = {"command": " ".join(sys.argv), "gpu": gpu, "torch": torch.__version__, "shape": asked.shape}
        asked.json.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
