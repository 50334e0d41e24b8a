"""The simulator: when each run of a program begins and ends, and whether that beats one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchweave.compiler.streams.cost import EVENT
from torchweave.compiler.streams.program import Program

MIN_GAIN = 0.05
"""A split must be predicted to take this part off the serial time, or it is not made."""


@dataclass(frozen=True)
class Span:
    """One run of the timeline; times in microseconds, as far as costs are."""

    run: int
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A program beside the same tasks on one stream."""

    spans: tuple[Span, ...]
    makespan: float
    serial: float

    @property
    def gain(self) -> float:
        """The part of the serial time that is saved; negative when the split is slower."""
        return 1 - self.makespan / self.serial if self.serial else 0.0

    def verdict(self) -> tuple[bool, str]:
        """Whether the split is worth making, and why."""
        figures = f"{self.makespan:.4g} against {self.serial:.4g} on one stream"
        if self.gain < MIN_GAIN:
            return False, f"predicted {figures}: less than {MIN_GAIN:.0%} faster"
        return True, f"predicted {figures}"

    def span_rows(self, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """The timeline as a report event holds it; `names` are those of each run's nodes."""
        return [
            {"stream": span.stream, "start": span.start, "end": span.end, "nodes": list(names[span.run])}
            for span in self.spans
        ]


def simulate(program: Program, costs: Sequence[float], event: float = EVENT) -> Timeline:
    """Run the program on paper: a stream runs in order, a wait for another stream costs `event` beside the wait."""
    spans: list[Span] = []
    free: dict[int, float] = {}
    for index, run in enumerate(program.runs):
        start = max([free.get(run.stream, 0.0), *(spans[each].end + event for each in run.waits)])
        if run.stream in program.forks and run.stream not in free:
            start = max(start, event)
        spans.append(Span(index, run.stream, start, start + sum(costs[task] for task in run.tasks)))
        free[run.stream] = spans[-1].end
    ends = [free.get(0, 0.0), *(spans[each].end + event for each in program.joins)]
    return Timeline(tuple(spans), max(ends), sum(costs))
