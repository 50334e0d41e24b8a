"""Time candidates as they run in a step: inside a CUDA graph, with cold weights.

A step replays one graph and reads each weight once. A candidate that is timed alone and repeatedly has its weight in the cache
and its launch on the critical path, which picks the wrong winner. So each candidate is one graph of many calls, each on another
copy of its operands, together larger than any cache. The graphs of all candidates are replayed in turn, so that clock drift
affects all of them alike. A winner is kept only if it gains more than the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

import torch

from torchweave.compiler.tuning.table import Entry, Table
from torchweave.report import Report

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
        """Time one call of each candidate, all in one run. Candidates that fail are left out."""
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


BASELINE = ""
"""Name of the baseline in timings, and as a table's choice."""

_NOISE_FACTOR = 2.0  # a candidate must save more than twice the combined noise
_MIN_GAIN = 0.01  # and more than this share of the baseline's time


@dataclass(frozen=True)
class TuningTask:
    """Candidates for an op or pass (`subject`) on a shape at a token count.

    Attributes:
        baseline: runs the default on copy i of the operands.
        candidates: the alternatives, by their choice in the table.
        copies: number of copies of the operands; together larger than the caches.
    """

    subject: str
    shape: str
    tokens: int
    baseline: Call
    candidates: Mapping[str, Call]
    copies: int


def measure_task(tuning_task: TuningTask, clock: GraphClock) -> Entry | None:
    """Time a task; None if the baseline cannot be timed."""
    assert BASELINE not in tuning_task.candidates, "the empty name is reserved for the baseline"
    timings = clock.time({BASELINE: tuning_task.baseline, **tuning_task.candidates}, tuning_task.copies)
    return best_entry(tuning_task.subject, tuning_task.shape, tuning_task.tokens, timings)


def best_entry(subject: str, shape: str, tokens: int, timings: Mapping[str, Timing]) -> Entry | None:
    """The table entry that follows from a task's timings; None without a timing of the baseline."""
    if BASELINE not in timings:
        return None
    baseline = timings[BASELINE]
    name = min(timings, key=lambda each: timings[each].microseconds)
    best = timings[name]
    noise = baseline.noise + best.noise
    if baseline.microseconds - best.microseconds <= max(_NOISE_FACTOR * noise, _MIN_GAIN * baseline.microseconds):
        name, best = BASELINE, baseline
    times = (round(best.microseconds, 3), round(baseline.microseconds, 3), round(noise, 3))
    return Entry(subject, shape, tokens, name, *times)


def tune(
    tuning_tasks: Iterable[TuningTask], clock: GraphClock, device: str, report: Report, total: int | None = None
) -> Table:
    """Run the tasks into a table, with an event `tuned` for each; a generator of tasks holds one task's operands at a time."""
    entries: list[Entry] = []
    with report.progress("measuring choices", total or 0) as advance:
        for tuning_task in tuning_tasks:
            entry = measure_task(tuning_task, clock)
            if entry is not None:
                entries.append(entry)
                report.event("tuned", **asdict(entry), saved=entry.saved)
            advance(1, f"{tuning_task.subject} {tuning_task.shape} T={tuning_task.tokens}")
    return Table(device, tuple(entries), "tuned on this machine")
