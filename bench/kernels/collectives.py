"""All-reduce times: NCCL, one-shot and two-shot over symmetric memory, alone and fused with norm and quantization.

    python bench/kernels/collectives.py --ranks 2 --json bench/results/collectives-2x_h200_202611.json

Starts a process per GPU. A CUDA graph holds many calls on distinct operands; graphs are replayed in turn, and a time is the median
over rounds of the slowest rank's, in microseconds per call. The table ends with the resulting size limits, as
`torchweave.distributed.symmetric_memory.KernelSizeLimits`: the operand size up to which each method was the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from torchweave.distributed.symmetric_memory import KernelSizeLimits, SymmetricCommunicator, open_symmetric
from torchweave.ops.collectives.all_reduce_norm import NormSpec, QuantSpec, apply_norm

CALLS, ROUNDS = 20, 15
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WIDTHS = (2048, 4096, 8192)
SLACK = 1.02  # run-to-run variation
SLOT_BYTES, LARGE_BYTES = 4 << 20, 64 << 20
SUMS = ("nccl", "one_shot", "large one_shot", "two_shot")
NORMS = tuple(f"{name} + norm" for name in SUMS) + tuple(
    f"{size}norm in one{where}" for size in ("", "large ") for where in ("", ", user buffer")
)
FP8, FP4 = (
    (*(f"{name} + norm {kind}" for name in SUMS), f"norm {kind} in one", f"large norm {kind} in one")
    for kind in ("fp8", "fp4")
)
GATHERS = ("nccl gather", "gather", "large gather")
Call = Callable[[Tensor], Any]


def ways(process_groups: ProcessGroups, width: int) -> dict[str, Call]:
    """Every method by name, for operands of `width` columns."""
    group, device = process_groups.groups["tp"], torch.device(process_groups.device)
    nccl = ProcessGroupCommunicator(group)
    one = open_symmetric(group, device, KernelSizeLimits(SLOT_BYTES, SLOT_BYTES, SLOT_BYTES, SLOT_BYTES, 0))
    large = open_symmetric(group, device, KernelSizeLimits(0, LARGE_BYTES, LARGE_BYTES, LARGE_BYTES, 0))
    two = open_symmetric(group, device, KernelSizeLimits(0, 0, 0, 0, LARGE_BYTES))
    weight = torch.rand(width, device=device, dtype=torch.bfloat16)
    found: dict[str, Call] = {
        name: each.all_reduce for name, each in zip(SUMS, (nccl, one, large, two), strict=True)
    }  # fmt: skip
    for name, each in zip(GATHERS, (nccl, one, large), strict=True):  # along columns, as for logits
        found[name] = lambda x, each=each: each.all_gather(x, 1)
    slot, fp4 = [0], QuantSpec("fp4", scale=torch.ones(1, device=device))

    def norm(x: Tensor, quant: QuantSpec | None) -> NormSpec:
        return NormSpec(x, weight, 1e-5, quant=quant, keep_norm=quant is None)

    def from_buffer(ranks: SymmetricCommunicator, x: Tensor) -> Any:
        slot[0] ^= 1  # CALLS is even: replays alternate too
        room = ranks.buffer(x.shape, x.dtype, slot[0])
        assert room is not None
        return ranks.fused_all_reduce_norm(room, norm(x, None))

    for names, quant in ((NORMS, None), (FP8, QuantSpec("fp8")), (FP4, fp4)):
        for name, total in zip(names, [found[name] for name in SUMS], strict=False):
            found[name] = lambda x, total=total, quant=quant: apply_norm(total(x), norm(x, quant))
    for prefix, ranks in (("", one), ("large ", large)):
        for title, quant in (("norm in one", None), ("norm fp8 in one", QuantSpec("fp8")), ("norm fp4 in one", fp4)):
            found[prefix + title] = lambda x, ranks=ranks, quant=quant: ranks.fused_all_reduce_norm(x, norm(x, quant))
        found[f"{prefix}norm in one, user buffer"] = lambda x, ranks=ranks: from_buffer(ranks, x)
    return found


def runs(name: str, size: int) -> bool:
    """Whether a method is measured for operands of `size` bytes."""
    if "nccl" in name:
        return True
    return size <= (LARGE_BYTES if "large" in name or "two_shot" in name else SLOT_BYTES)


def record(call: Call, operands: list[Tensor]) -> torch.cuda.CUDAGraph:
    """A CUDA graph with a call on each operand."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for x in operands[:2]:
            call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for x in operands:
            call(x)
    return graph


def measure(process_groups: ProcessGroups, found: dict[str, Call], rows: int, width: int) -> dict[str, float]:
    """Microseconds per call of every method, from the slowest rank of each round."""
    operands = [torch.randn(rows, width, device=process_groups.device).bfloat16() for _ in range(CALLS)]
    graphs = {name: record(call, operands) for name, call in found.items() if runs(name, operands[0].nbytes)}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            process_groups.barrier()
            graph.replay()  # the first replay synchronizes the ranks
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / (5 * CALLS))
    names = list(times)
    mine = torch.tensor([times[name] for name in names])
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=process_groups.host)
    return {name: statistics.median(mine[index].tolist()) for index, name in enumerate(names)}


def rank_main(rank: int, size: int, address: tuple[str, int], rows: list[int], widths: list[int], out: str) -> None:
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    process_groups = init_process_groups(rank, size, 1, device, join_rendezvous_store(address))
    found = []
    for width in widths:
        calls = ways(process_groups, width)
        for count in rows:
            for name, microseconds in measure(process_groups, calls, count, width).items():
                found.append({"rows": count, "width": width, "way": name, "microseconds": microseconds})
            if rank == 0:
                print(f"{size} ranks, {count} x {width} done", flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    process_groups.barrier()
    destroy_process_groups(process_groups)


def table(results: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """A Markdown table with a row per size; the fastest method in bold."""
    lines = ["| rows x width | " + " | ".join(names) + " |", "|---:|" + "---:|" * len(names)]
    for width, rows in sorted({(row["width"], row["rows"]) for row in results}):
        times = {row["way"]: row["microseconds"] for row in results if (row["width"], row["rows"]) == (width, rows)}
        best = min(times[name] for name in names if name in times)
        shown = {name: "-" if name not in times else f"{times[name]:.1f}" for name in names}
        cells = (f"**{shown[name]}**" if times.get(name) == best else shown[name] for name in names)
        lines.append(f"| {rows} x {width} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranges_of(results: list[dict[str, Any]]) -> dict[str, int]:
    """Largest size in bytes up to which each method is the fastest, for `KernelSizeLimits`."""
    sizes: dict[int, list[dict[str, float]]] = {}
    for width, rows in {(row["width"], row["rows"]) for row in results}:
        times = {row["way"]: row["microseconds"] for row in results if (row["width"], row["rows"]) == (width, rows)}
        sizes.setdefault(rows * width * 2, []).append(times)

    def up_to(way: str, others: tuple[str, ...], above: int = 0) -> int:
        reached = above
        for size in sorted(size for size in sizes if size > above):
            for times in sizes[size]:
                if way not in times or any(times[way] > SLACK * times[other] for other in others if other in times):
                    return reached
            reached = size
        return reached

    slots = max(up_to("one_shot", SUMS), up_to("norm in one", NORMS[:4]))
    one_shot = up_to("large one_shot", ("nccl", "two_shot"), up_to("one_shot", SUMS))
    norm = up_to("large norm in one", NORMS[:4], up_to("norm in one", NORMS[:4]))
    gather = up_to("large gather", GATHERS[:1], up_to("gather", GATHERS[:1]))
    return {
        "slots": slots, "gather": gather, "one_shot": one_shot, "norm": norm, "two_shot": up_to("two_shot", ("nccl",), one_shot)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument(
        "--json", type=Path, help="write every measurement to this JSON file, and a Markdown table next to it"
    )
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"this benchmark needs {arguments.ranks} GPUs; there are {torch.cuda.device_count()}")
    _store, address = create_rendezvous_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        mp.spawn(
            rank_main, (arguments.ranks, address, arguments.rows, arguments.widths, str(out)), nprocs=arguments.ranks
        )
        results = json.loads(out.read_text())
    size_limits = ranges_of(results)
    parts = [table(results, names) for names in (SUMS, NORMS, FP8, FP4, GATHERS)]
    text = "\n\n".join([*parts, f"Ranges that follow, in bytes: {size_limits}"])
    print(text)
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
        gpu = f"{arguments.ranks} x {torch.cuda.get_device_name()}"
        facts = {"command": " ".join(sys.argv), "commit": commit.strip(), "gpu": gpu, "torch": torch.__version__}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts | {"ranges": size_limits, "results": results}, indent=1) + "\n")
        how = f"`{facts['command']}` at {facts['commit']}, torch {facts['torch']}"
        head = f"# Sums over ranks: {gpu}\n\nMicroseconds a call in a CUDA graph, bfloat16: {how}.\n\n"
        arguments.json.with_suffix(".md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
