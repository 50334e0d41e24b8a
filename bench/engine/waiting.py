"""Scheduling cost of long prompts and waiting requests, without a device: milliseconds per scheduled step.

    python bench/engine/waiting.py [--json FILE]

`new`: a prompt without a cached prefix arrives while eight requests decode. `cached`: a prompt with a cached prefix. `full
cache`: 150 requests with a common prefix, most of which wait for blocks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.result import environment
from torchweave.engine.kv_cache.block_manager import AttentionWindow, BlockManager
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.scheduler import Scheduler
from torchweave.engine.scheduler.step import StepResult
from torchweave.ops.slot_state import SlotState

BLOCK, VOCAB, SLOTS = 16, 128_000, 256
POLICY = "guaranteed_no_evict"


class Engine:
    """A scheduler whose steps are answered with fake tokens."""

    def __init__(self, policy: str, num_blocks: int, longest: int, window: AttentionWindow) -> None:
        columns = -(-longest // BLOCK)
        self.state = SlotState(SLOTS, columns)
        kv = BlockManager(num_blocks, BLOCK, SLOTS, columns, (window,), 8192 + BLOCK)
        limits = Limits(SLOTS, 8192, longest, VOCAB, mixed_step_sizes=(256, 384, 512))
        self.scheduler = Scheduler(limits, kv, POLICIES[policy], self.state.updates())
        self.rng = np.random.default_rng(0)
        self.count = 0
        gc.collect()
        gc.freeze()

    def prompt(self, length: int) -> np.ndarray:
        return self.rng.integers(0, VOCAB, length).astype(np.int32)

    def add(self, prompt: np.ndarray, length: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        self.scheduler.add(InferenceRequest(self.count, prompt, params, True), self.count)
        self.count += 1

    def steps(self) -> Iterator[tuple[float, bool]]:
        """Milliseconds to schedule each step and whether it prefills, until all requests finish."""
        while True:
            begin = time.perf_counter()
            self.scheduler.poll_parts()
            step = self.scheduler.schedule()
            formed = time.perf_counter()
            if step is None:
                return
            if step.updates is not None:
                self.state.write(*step.updates)
            tokens = self.rng.integers(0, VOCAB, step.num_rows).astype(np.int32)
            self.scheduler.update(step, StepResult(tokens, "plain"))
            self.scheduler.state_changes.clear()
            yield (formed - begin) * 1e3, bool(step.chunks)


def new(tokens: int, window: AttentionWindow) -> dict[str, float]:
    engine = Engine(POLICY, 2 * tokens // BLOCK + 4000, tokens + 4000, window)
    for _ in range(8):
        engine.add(engine.prompt(20), tokens // 200 + 500)
    steps = engine.steps()
    for _ in itertools.islice(steps, 20):
        pass
    engine.add(engine.prompt(tokens), 16)
    reading = [took for took, _ in itertools.takewhile(lambda step: step[1], steps)]
    return {"first": reading[0], "median of the rest": float(np.median(reading[1:] or reading)), "sum": sum(reading)}


def cached(tokens: int, window: AttentionWindow) -> dict[str, float]:
    engine = Engine(POLICY, 3 * tokens // BLOCK + 4000, tokens + 4000, window)
    prompt = engine.prompt(tokens)
    engine.add(prompt, 16)
    list(engine.steps())
    engine.add(np.concatenate([prompt, engine.prompt(300)]), 16)
    return {"first": next(engine.steps())[0]}


def full(tokens: int, policy: str) -> dict[str, float]:
    each = 800 // BLOCK + 1  # blocks of a request without the common prefix
    engine = Engine(policy, tokens // BLOCK + 40 * each, tokens + 1000, AttentionWindow())
    common = engine.prompt(tokens)
    for _ in range(150):
        engine.add(np.concatenate([common, engine.prompt(300)]), int(engine.rng.integers(100, 500)))
    found = [took for took, _ in engine.steps() if engine.scheduler.num_waiting][60:]
    return {"median": float(np.median(found)), "p90": float(np.quantile(found, 0.9))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for tokens in (2_000, 32_000, 128_000):
        rows[f"new prompt, {tokens:,} tokens"] = new(tokens, AttentionWindow())
        rows[f"cached prefix, {tokens:,} tokens"] = cached(tokens, AttentionWindow())
    for tokens in (8_000, 32_000):
        rows[f"new prompt, {tokens:,} tokens, all layers with a window of 4,096"] = new(tokens, AttentionWindow(4096))
    for policy in ("guaranteed_no_evict", "max_utilization"):
        for tokens in (2_000, 32_000):
            rows[f"full cache, common prefix of {tokens:,} tokens, {policy}"] = full(tokens, policy)
    for name, row in rows.items():
        print(f"{name:75}", ", ".join(f"{key} {value:.2f} ms" for key, value in row.items()), flush=True)
    if args.json:
        result: dict[str, Any] = {"environment": environment("cpu"), "milliseconds": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
