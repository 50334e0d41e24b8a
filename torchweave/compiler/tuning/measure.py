"""Time candidates as they run in a step: inside a CUDA graph, with cold weights.

A step replays one graph and reads each weight once. A candidate that is timed alone and repeatedly has its weight in the cache
and its launch on the critical path, which picks the wrong winner. So each candidate is one graph of many calls, each on another
copy of its operands, together larger than any cache. The graphs of all candidates are replayed in turn, so that clock drift
affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

COLD_BYTES = 256 << 20
"""Minimum total size of the copies of a candidate's weights: several times the largest L2 cache."""

Call = Callable[[int], object]
"""Runs a candidate on copy i of its operands."""


@dataclass(frozen=True)
class Timing:
    """Duration of one call of a candidate.

    Attributes:
        microseconds: median over replays.
        noise: half the interquartile range, in microseconds.
    """

    microseconds: float
    noise: float


class Clock(Protocol):
    """Times candidates; tests use one with fixed results."""

    def time(self, candidates: Mapping[str, Call], copies: int) -> dict[str, Timing]:
        """Time one call of each candidate, all in one run. Candidates that fail are left out."""
        ...


def copies_for(size: int, at_least: int = 4) -> int:
    """Number of copies of operands of `size` bytes that keeps each call's operands out of the caches."""
    return max(at_least, -(-COLD_BYTES // size))


def timing_of(microseconds: list[float]) -> Timing:
    """Median and noise of the times of single replays."""
    ordered = sorted(microseconds)
    quarter = len(ordered) // 4
    return Timing(median(ordered), (ordered[-1 - quarter] - ordered[quarter]) / 2)


class GraphClock:
    """Times candidates with CUDA graphs.

    Args:
        rounds: replays of each candidate.
        failed: called with the name and error of a candidate that fails, such as a kernel with too much shared memory.
    """

    def __init__(self, rounds: int = 12, failed: Callable[[str, Exception], None] | None = None) -> None:
        self.rounds = rounds
        self.failed = failed or (lambda name, error: None)

    def time(self, candidates: Mapping[str, Call], copies: int) -> dict[str, Timing]:
        """See `Clock.time`."""
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, call in candidates.items():
            try:
                graphs[name] = _capture_graph(call, copies)
            except Exception as error:
                self.failed(name, error)
        events = {name: [] for name in graphs}
        for graph in graphs.values():
            graph.replay()
        for _ in range(self.rounds):
            for name, graph in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                events[name].append((begin, end))
        torch.cuda.synchronize()
        return {
            name: timing_of([begin.elapsed_time(end) * 1e3 / copies for begin, end in pairs])
            for name, pairs in events.items()
        }


def _capture_graph(call: Call, copies: int) -> torch.cuda.CUDAGraph:
    """A graph of one call per copy; an eager call before builds the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    return graph
