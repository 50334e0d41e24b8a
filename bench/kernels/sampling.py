"""Microseconds of a sampling step inside a CUDA graph, by batch size and kind of sampling.

    python bench/kernels/sampling.py [--vocab 128256] [--rows 1 8 64 256] [--json FILE]

Logits are bfloat16 and, as in a decode step, in the L2 cache. "peaked" logits resemble a trained model's (few tokens hold the
mass); "flat" logits are the worst case of the top-p search.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState

KINDS = {  # temperature, top_k, top_p, min_p, standard deviation of the logits
    "greedy": (0.0, 0, 1.0, 0.0, 3.0),
    "temperature": (1.0, 0, 1.0, 0.0, 3.0),
    "top_k 50": (1.0, 50, 1.0, 0.0, 3.0),
    "top_p 0.95 peaked": (1.0, 0, 0.95, 0.0, 8.0),
    "top_k 50 top_p 0.9": (1.0, 50, 0.9, 0.0, 3.0),
    "min_p 0.1": (1.0, 0, 1.0, 0.1, 3.0),
    "top_p 0.95 flat": (1.0, 0, 0.95, 0.0, 0.5),
}
STEPS, REPLAYS = 20, 11


def measure(rows: int, vocab_size: int, kind: str) -> float:
    """Median microseconds per `sample` over replays of a graph with STEPS calls."""
    temperature, top_k, top_p, min_p, spread = KINDS[kind]
    state = SlotState(rows, 1, device="cuda")
    updates = state.updates()
    every = np.arange(rows)
    for name, value in (
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("min_p", min_p),
        ("seed_lo", every),
    ):
        updates.set(name, every, value)
    updates.set_decode_slots(every)
    state.apply(updates)
    logits = (torch.randn(rows, vocab_size, device="cuda") * spread).bfloat16()
    out = torch.empty(rows, dtype=torch.int32, device="cuda")
    sample(logits, state.slots, state, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            sample(logits, state.slots, state, out)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in pairwise(marks)])) * 1e3 / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    results = {
        kind: {rows: round(measure(rows, arguments.vocab, kind), 2) for rows in arguments.rows} for kind in KINDS
    }
    print(f"{'us per step':22}" + "".join(f"{rows:>10}" for rows in arguments.rows))
    for kind, times in results.items():
        print(f"{kind:22}" + "".join(f"{times[rows]:>10.1f}" for rows in arguments.rows))
    if arguments.json:
        facts = {
            "command": " ".join(sys.argv),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "us": results,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
