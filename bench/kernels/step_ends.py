"""Host-device transfers at the start and end of a step: added time with copies and with kernels.

    python bench/kernels/step_ends.py [--json FILE]

A busy-wait graph replaces the model. Steps are launched ahead so that the device never waits for the host; results are microseconds
per step beyond the graph alone, on the device and on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.result import environment
from torchweave.engine.runner.step_buffers import packed_size
from torchweave.ops.kernels.step_io import launch_scatter
from torchweave.ops.slot_state import carry

Launch = Callable[[], object]

CYCLES = 1_000_000  # busy-wait of the graph, about 0.6 ms
STEPS, ROUNDS = 24, 15


class Ends:
    """Transfers of a step of `rows` rows with `changes` changed slot values and `tokens` tokens read back (0: none)."""

    def __init__(self, rows: int, changes: int, tokens: int) -> None:
        self.changes, self.size = changes, packed_size(rows, tokens) if tokens else 0
        self.arena, self.packed = _on_device(100_000), _on_device(max(self.size, 1))
        self.pairs, self.out = _on_device(2 * max(changes, 1)), _on_device(rows)
        self.said, self.drawn = _pinned(max(self.size, 1)), _pinned(rows)
        self.changed = _pinned(2 * max(changes, 1))
        self.changed[:changes] = torch.arange(changes) * 7
        self.event = torch.cuda.Event()

    def copied(self, step: Launch) -> None:
        """Transfer by copy engines, with an event per buffer."""
        if self.changes:
            self.pairs.copy_(self.changed, non_blocking=True)
            self.event.record()
            launch_scatter(self.arena, self.pairs, self.changes)
        if self.size:
            self.packed.copy_(self.said, non_blocking=True)
            self.event.record()
        step()
        self.drawn.copy_(self.out, non_blocking=True)
        self.event.record()

    def carried(self, step: Launch) -> None:
        """Transfer by kernels, as in the runner."""
        if self.changes:
            launch_scatter(self.arena, self.changed, self.changes)
            self.event.record()
        if self.size:
            carry(self.said, self.packed)
        step()
        carry(self.out, self.drawn)
        self.event.record()


def _on_device(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device="cuda")


def _pinned(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)


def record() -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(CYCLES)
    return graph


def measure(launch: Launch) -> tuple[float, float]:
    """Median microseconds per step on the device and on the host."""
    device, host = [], []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        launch(), launch()
        begin.record()
        began = time.perf_counter()
        for _ in range(STEPS):
            launch()
        host.append((time.perf_counter() - began) / STEPS * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) / STEPS * 1e3)
    return statistics.median(device), statistics.median(host)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the host-device transfers at the start and end of a step.")
    parser.add_argument("--json", type=Path, help="write the results to this JSON file")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This machine has no GPU; there is nothing to copy to.")
    results = []
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        replay = record().replay
        for rows, changes, tokens in ((1, 0, 0), (48, 64, 0), (48, 64, 256), (256, 512, 2048)):
            ends = Ends(rows, changes, tokens)
            ways: dict[str, Launch] = {
                "alone": replay,
                "copied": lambda ends=ends: ends.copied(replay),
                "carried": lambda ends=ends: ends.carried(replay),
            }
            found = {name: measure(launch) for name, launch in ways.items()}
            found = {name: [measure(launch), found[name]] for name, launch in ways.items()}  # in turns, twice
            facts = {"rows": rows, "changes": changes, "tokens": tokens}
            for name in ("copied", "carried"):
                added, on_host = (
                    statistics.mean(a[part] - b[part] for a, b in zip(found[name], found["alone"], strict=True))
                    for part in (0, 1)
                )
                results.append({**facts, "way": name, "device_us": round(added, 2), "host_us": round(on_host, 2)})
                print(
                    f"{rows:4} rows {changes:4} changes {tokens:5} tokens  {name:8} +{added:5.1f} us, host +{on_host:5.1f}"
                )
    if asked.json is not None:
        asked.json.write_text(json.dumps({"environment": environment("cuda"), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
