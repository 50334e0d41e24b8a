"""Stream program: runs of tasks in launch order, the events between them, and the predicted timeline.

Consecutive tasks of one stream without a synchronisation point in between are one run. An event is recorded once, after a run
that another stream waits for; waits implied by earlier ones are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweave.compiler.streams.cost import EVENT
from torchweave.compiler.streams.schedule import ScheduledTask

MIN_GAIN = 0.05
"""Minimum predicted share of the serial time that a split must save."""


@dataclass(frozen=True)
class Run:
    """Tasks that one stream runs without synchronisation.

    Attributes:
        waits: runs of other streams whose events this stream waits for before.
        signals: whether an event is recorded after.
    """

    stream: int
    tasks: tuple[int, ...]
    waits: tuple[int, ...]
    signals: bool


@dataclass(frozen=True)
class Program:
    """Runs in launch order.

    Attributes:
        joins: runs whose events the caller's stream waits for at the end.
    """

    runs: tuple[Run, ...]
    joins: tuple[int, ...]

    @property
    def num_streams(self) -> int:
        return len({run.stream for run in self.runs})

    @property
    def forks(self) -> tuple[int, ...]:
        """Streams that wait for the caller's earlier work directly; the others wait for a run that does."""
        first: dict[int, Run] = {}
        for run in self.runs:
            first.setdefault(run.stream, run)
        return tuple(stream for stream, run in sorted(first.items()) if stream and not run.waits)


def program(scheduled_tasks: Sequence[ScheduledTask], dependencies: Sequence[Mapping[int, object]]) -> Program:
    """The program of a schedule; `scheduled_tasks` are in launch order."""
    waits, joins = _waits(scheduled_tasks, dependencies)
    signals = {each for tasks in waits.values() for each in tasks} | set(joins)
    runs: list[list[ScheduledTask]] = []
    latest: dict[int, list[ScheduledTask]] = {}  # stream -> its current run
    for scheduled in scheduled_tasks:
        run = latest.get(scheduled.stream)
        if run is None or waits[scheduled.task] or run[-1].task in signals:
            run = latest[scheduled.stream] = []
            runs.append(run)
        run.append(scheduled)
    run_of = {scheduled.task: index for index, run in enumerate(runs) for scheduled in run}
    done = (
        Run(
            run[0].stream,
            tuple(scheduled.task for scheduled in run),
            tuple(run_of[each] for each in waits[run[0].task]),
            run[-1].task in signals,
        )
        for run in runs
    )
    return Program(tuple(done), tuple(run_of[each] for each in joins))


def _waits(
    scheduled_tasks: Sequence[ScheduledTask], dependencies: Sequence[Mapping[int, object]]
) -> tuple[dict[int, list[int]], list[int]]:
    """For each task the tasks of other streams to wait for, and the tasks that the caller's stream waits for at the end,
    without waits that others imply."""
    position = {scheduled.task: index for index, scheduled in enumerate(scheduled_tasks)}
    stream = {scheduled.task: scheduled.stream for scheduled in scheduled_tasks}
    # Vector clocks: task -> stream -> position of the last task on that stream that is complete when the task is.
    clocks: dict[int, dict[int, int]] = {}
    latest: dict[int, dict[int, int]] = {}  # clock of the last task of a stream

    def needed(tasks: set[int], clock: dict[int, int]) -> list[int]:
        required = []
        for task in sorted(tasks, key=position.__getitem__, reverse=True):  # later tasks may imply earlier ones
            if clock.get(stream[task], -1) < position[task]:
                required.append(task)
                for other, last in clocks[task].items():
                    clock[other] = max(last, clock.get(other, -1))
        return sorted(required, key=position.__getitem__)

    waits: dict[int, list[int]] = {}
    for scheduled in scheduled_tasks:
        clock = dict(latest.get(scheduled.stream, {}))
        waits[scheduled.task] = needed(set(dependencies[scheduled.task]), clock)
        clocks[scheduled.task] = latest[scheduled.stream] = {**clock, scheduled.stream: position[scheduled.task]}
    ends = {
        max((task for task in position if stream[task] == each), key=position.__getitem__) for each in latest if each
    }
    return waits, needed(ends, dict(latest.get(0, {})))


@dataclass(frozen=True)
class Span:
    """A run on the timeline; times in microseconds or in cost weights."""

    run: int
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Predicted spans of a program, its end (`makespan`), and the time of the same tasks on one stream (`serial`)."""

    spans: tuple[Span, ...]
    makespan: float
    serial: float

    @property
    def gain(self) -> float:
        """Saved share of the serial time; negative if the split is slower."""
        return 1 - self.makespan / self.serial if self.serial else 0.0

    def verdict(self) -> tuple[bool, str]:
        """Whether the split pays, and why."""
        figures = f"{self.makespan:.4g} against {self.serial:.4g} on one stream"
        if self.gain < MIN_GAIN:
            return False, f"predicted {figures}: less than {MIN_GAIN:.0%} faster"
        return True, f"predicted {figures}"

    def span_rows(self, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """The timeline as rows of a report event; `names` holds each run's node names."""
        return [
            {"stream": span.stream, "start": span.start, "end": span.end, "nodes": list(names[span.run])}
            for span in self.spans
        ]


def simulate(program: Program, costs: Sequence[float], event: float = EVENT) -> Timeline:
    """Predict the timeline: each stream runs in order, and a wait for another stream costs `event` extra."""
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
