"""Times candidates the way they will run: inside a CUDA graph, with weights that come from memory.

A step of a model replays one graph and reads every weight once, so a candidate that is timed by itself and again and again finds
its weight in the cache and the launch on its critical path, and the wrong one wins. Here each candidate is one graph of many
calls, each on another copy of what it reads, together larger than any cache; the graphs of all candidates are replayed in turn,
so that a clock that drifts drifts for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

COLD_BYTES = 256 << 20
"""What the copies of a candidate's weights come to, at least: several times the largest L2 cache."""

Call = Callable[[int], object]
"""Carries out a candidate on copy number i of its operands."""


@dataclass(frozen=True)
class Timing:
    """What one call of a candidate takes.

    Attributes:
        microseconds: the median over replays.
        noise: half of the distance between the quartiles, in microseconds: half of all replays lay this close to the middle.
    """

    microseconds: float
    noise: float


class Clock(Protocol):
    """Something that times candidates; the one for tests returns what it was told."""

    def time(self, candidates: Mapping[str, Call], copies: int) -> dict[str, Timing]:
        """Microseconds of one call of each candidate, all timed in one run. A candidate that cannot run is left out."""
        ...


def copies_for(size: int, at_least: int = 4) -> int:
    """How many copies of operands of `size` bytes keep every call's operands out of the caches."""
    return max(at_least, -(-COLD_BYTES // size))


def timing_of(microseconds: list[float]) -> Timing:
    """Median and noise of the times of single replays."""
    ordered = sorted(microseconds)
    quarter = len(ordered) // 4
    return Timing(median(ordered), (ordered[-1 - quarter] - ordered[quarter]) / 2)


class GraphClock:
    """Times on a GPU, by CUDA graphs.

    Args:
        rounds: replays of every candidate.
        failed: is told the name and the error of a candidate that cannot run, such as a kernel that asks for more shared
            memory than there is.
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
        marks = {name: [] for name in graphs}
        for graph in graphs.values():
            graph.replay()
        for _ in range(self.rounds):
            for name, graph in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                marks[name].append((begin, end))
        torch.cuda.synchronize()
        return {
            name: timing_of([begin.elapsed_time(end) * 1e3 / copies for begin, end in pairs])
            for name, pairs in marks.items()
        }


def _capture_graph(call: Call, copies: int) -> torch.cuda.CUDAGraph:
    """A graph of one call on every copy, after a first call outside of it that builds what there is to build."""
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
