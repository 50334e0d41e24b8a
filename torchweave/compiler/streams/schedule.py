"""List scheduling of tasks onto streams, by TensorRT-LLM's rules.

A task's priority is the longest path from its start to the end of the piece. The ready task with the highest priority is next,
on a stream that is free when its inputs are ready, else on the stream that is free first.

Consecutive tasks of one stream without a synchronization point in between are one run of the program. An event is recorded once,
after a run that another stream waits for; waits implied by earlier ones are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torchweave.compiler.streams.tasks import EVENT


@dataclass(frozen=True)
class ScheduledTask:
    """A task on a stream; stream 0 is the caller's. Times in microseconds or in cost weights."""

    task: int
    stream: int
    start: float
    end: float


def priorities(costs: Sequence[float], dependencies: Sequence[Collection[int]]) -> list[float]:
    """For each task, the cost of the longest path from its start to the end. Tasks are in topological order."""
    longest = list(costs)
    for task in reversed(range(len(costs))):
        for earlier in dependencies[task]:
            longest[earlier] = max(longest[earlier], costs[earlier] + longest[task])
    return longest


def schedule(
    costs: Sequence[float],
    dependencies: Sequence[Collection[int]],
    num_streams: int,
    event: float = 0.0,
    pinned: Collection[int] = (),
) -> list[ScheduledTask]:
    """Assign tasks to streams; returns them in launch order, each after its dependencies.

    Args:
        costs: cost of each task.
        dependencies: for each task, the earlier tasks that it waits for.
        num_streams: at least 1.
        event: cost of a wait for another stream.
        pinned: tasks that must run on the caller's stream, which all pieces share, such as collectives.
    """
    priority = priorities(costs, dependencies)
    awaited = {earlier for each in dependencies for earlier in each}
    free = [0.0] * num_streams
    placed: dict[int, ScheduledTask] = {}
    waiting = set(range(len(costs)))
    while waiting:
        ready = [task for task in waiting if all(earlier in placed for earlier in dependencies[task])]
        task = min(ready, key=lambda each: (-priority[each], each))
        waiting.discard(task)
        inputs = [placed[earlier] for earlier in dependencies[task]]
        begins = [
            max([until, *(each.end + (event if each.stream != stream else 0.0) for each in inputs)])
            for stream, until in enumerate(free)
        ]
        # The caller's stream must wait for the last task of each other stream.
        start_costs = [
            begin + (event if stream and task not in awaited else 0.0) for stream, begin in enumerate(begins)
        ]
        preferred = max(inputs, key=lambda scheduled: scheduled.end).stream if inputs and task in awaited else 0
        ends = max((scheduled.end for scheduled in inputs), default=0.0)
        stream = 0 if task in pinned else _stream(free, ends, start_costs, preferred)
        placed[task] = ScheduledTask(task, stream, begins[stream], begins[stream] + costs[task])
        free[stream] = placed[task].end
    return list(placed.values())


def _stream(free: Sequence[float], ready: float, start_costs: Sequence[float], preferred: int) -> int:
    """The cheapest stream that is free at `ready`, ties by `preferred`, then by the latest to become free; if none is free, the
    first to become free."""
    idle = [stream for stream, until in enumerate(free) if until <= ready]
    if not idle:
        return min(range(len(free)), key=lambda stream: (free[stream], stream))
    return min(idle, key=lambda stream: (start_costs[stream], stream != preferred, -free[stream], stream))


MIN_GAIN = 0.05
"""Minimum predicted share of the serial time that a split must save."""


@dataclass(frozen=True)
class Run:
    """Tasks that one stream runs without synchronization.

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


def program(scheduled_tasks: Sequence[ScheduledTask], dependencies: Sequence[Collection[int]]) -> Program:
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
    scheduled_tasks: Sequence[ScheduledTask], dependencies: Sequence[Collection[int]]
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

    def decision(self) -> tuple[bool, str]:
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
