"""Overlap of a product with the all-reduce of its previous part: a layer's down projection, all-reduce and norm.

    python bench/kernels/overlap.py --json bench/results/overlap-2x_h200_202611.json

Starts a process on each of two GPUs. A CUDA graph holds six layers; graphs are replayed in turn, and a time is the median
over rounds of the slowest rank's, in microseconds per layer. `serial` is the engine's form: the product, then all-reduce,
residual and norm in one launch. `chunks`: rows are split, and all-reduces run on a second stream as parts complete. `copies`:
the second stream only copies parts to the other rank, which uses no multiprocessors; both ranks add at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.distributed.process_groups import (
    ProcessGroupCommunicator,
    ProcessGroups,
    create_rendezvous_store,
    destroy_process_groups,
    init_process_groups,
    join_rendezvous_store,
)
from torchweave.distributed.symmetric_memory import KernelSizeLimits, open_symmetric
from torchweave.ops.collectives.all_reduce_norm import NormSpec, apply_norm, fused_all_reduce_norm

HIDDEN, INNER = 4096, 14336
LAYERS, ROUNDS, REPLAYS = 6, 10, 3
TOKENS = (512, 1024, 2048, 4096, 8192)
LARGE_BYTES = 64 << 20


class Layers:
    """The variants for T tokens; `x[i] [T, INNER / 2]` is the input of layer i's projection."""

    def __init__(self, process_groups: ProcessGroups, tokens: int) -> None:
        device, group = torch.device(process_groups.device), process_groups.groups["tp"]
        self.nccl = ProcessGroupCommunicator(group)
        self.own = open_symmetric(group, device, KernelSizeLimits(0, LARGE_BYTES, LARGE_BYTES, LARGE_BYTES, 0))
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        inner = INNER // process_groups.size
        self.x = [torch.randn(tokens, inner, **options) for _ in range(LAYERS)]
        self.weights = [torch.randn(HIDDEN, inner, **options) * 0.01 for _ in range(LAYERS)]
        self.residual, self.scale = torch.randn(tokens, HIDDEN, **options), torch.rand(HIDDEN, **options)
        self.side = torch.cuda.Stream(device)
        self.shared = symm.empty(2, tokens, HIDDEN, **options)
        self.handle = symm.rendezvous(self.shared, group)
        self.peer = self.handle.get_buffer(1 - process_groups.rank, self.shared.shape, torch.bfloat16)

    def norm(self, residual: Tensor) -> NormSpec:
        return NormSpec(residual, self.scale, 1e-5)

    @contextmanager
    def beside(self) -> Any:
        """Run on the second stream after the first stream's current work."""
        ready = torch.cuda.Event()
        ready.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(ready)
            yield

    def join(self) -> None:
        done = torch.cuda.Event()
        done.record(self.side)
        torch.cuda.current_stream().wait_event(done)

    def products(self) -> None:
        for x, weight in zip(self.x, self.weights, strict=True):
            x @ weight.T

    def serial(self, ranks: Any) -> None:
        for x, weight in zip(self.x, self.weights, strict=True):
            fused_all_reduce_norm(ranks, x @ weight.T, self.norm(self.residual))

    def chunks(self, ranks: Any, parts: int) -> None:
        for x, weight in zip(self.x, self.weights, strict=True):
            for rows, residual in zip(x.chunk(parts), self.residual.chunk(parts), strict=True):
                y = rows @ weight.T
                with self.beside():
                    fused_all_reduce_norm(ranks, y, self.norm(residual))
            self.join()

    def copies(self, parts: int) -> None:
        for layer, (x, weight) in enumerate(zip(self.x, self.weights, strict=True)):
            there, here = self.peer[layer % 2], self.shared[layer % 2]
            found = []
            for rows, place in zip(x.chunk(parts), there.chunk(parts), strict=True):
                found.append(rows @ weight.T)
                with self.beside():
                    place.copy_(found[-1])
            self.join()
            self.handle.barrier(channel=0)
            apply_norm(torch.cat(found) + here, self.norm(self.residual))

    def ways(self) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {"products alone": self.products}
        for name, ranks in (("", self.own), (", NCCL", self.nccl)):
            found[f"serial{name}"] = lambda ranks=ranks: self.serial(ranks)
            for parts in (2, 4):
                found[f"{parts} chunks{name}"] = lambda ranks=ranks, parts=parts: self.chunks(ranks, parts)
        return found | {f"{parts} copies": lambda parts=parts: self.copies(parts) for parts in (2, 4)}


def record(way: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        way()
    return graph


def measure(process_groups: ProcessGroups, tokens: int) -> dict[str, float]:
    """Microseconds per layer of every variant, from the slowest rank of each round."""
    layers = Layers(process_groups, tokens)  # keeps the graphs' tensors alive
    graphs = {name: record(way) for name, way in layers.ways().items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            process_groups.barrier()
            graph.replay()  # the first replay synchronizes the ranks
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / (REPLAYS * LAYERS))
    every = torch.tensor(list(times.values()))
    dist.all_reduce(every, op=dist.ReduceOp.MAX, group=process_groups.host)
    return {name: round(statistics.median(row), 1) for name, row in zip(times, every.tolist(), strict=True)}


def rank_main(rank: int, address: tuple[str, int], tokens: list[int], out: str) -> None:
    torch.cuda.set_device(rank)
    process_groups = init_process_groups(rank, 2, 1, f"cuda:{rank}", join_rendezvous_store(address))
    found = []
    for count in tokens:
        found.append({"tokens": count, **measure(process_groups, count)})
        if rank == 0:
            print(json.dumps(found[-1]), flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    process_groups.barrier()
    destroy_process_groups(process_groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit(f"this benchmark needs 2 GPUs; there are {torch.cuda.device_count()}")
    _store, address = create_rendezvous_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        mp.spawn(rank_main, (address, arguments.tokens, str(out)), nprocs=2)
        results = json.loads(out.read_text())
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
        facts = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit.strip(),
            "gpu": f"2 x {torch.cuda.get_device_name()}",
            "torch": torch.__version__,
        }
        arguments.json.write_text(json.dumps(facts | {"microseconds a layer": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
