"""The program: what each stream does, in the order in which it is launched.

Tasks that follow each other on one stream, with nothing to wait for and nobody waiting in between, are one run. An event is
recorded after a run that another stream waits for, once, and only a wait that does not follow from earlier ones is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchweave.compiler.streams.schedule import ScheduledTask


@dataclass(frozen=True)
class Run:
    """Tasks that one stream runs without looking left or right.

    Attributes:
        waits: runs of other streams whose event this stream waits for first.
        signals: whether an event is recorded afterwards.
    """

    stream: int
    tasks: tuple[int, ...]
    waits: tuple[int, ...]
    signals: bool


@dataclass(frozen=True)
class Program:
    """Runs in the order in which they are launched, and how they end.

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
        """The streams that must wait for what the caller launched before the piece. The others wait for a run that does."""
        first: dict[int, Run] = {}
        for run in self.runs:
            first.setdefault(run.stream, run)
        return tuple(stream for stream, run in sorted(first.items()) if stream and not run.waits)


def program(scheduled_tasks: Sequence[ScheduledTask], dependencies: Sequence[Mapping[int, object]]) -> Program:
    """The program of a schedule; `scheduled_tasks` are in the order of launching."""
    waits, joins = _waits(scheduled_tasks, dependencies)
    signals = {each for found in waits.values() for each in found} | set(joins)
    runs: list[list[ScheduledTask]] = []
    latest: dict[int, list[ScheduledTask]] = {}  # stream -> its run so far
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
    """For each task the tasks of other streams that its stream must wait for first, and those that the caller's must at the
    end: none that other waits imply."""
    place = {scheduled.task: index for index, scheduled in enumerate(scheduled_tasks)}
    stream = {scheduled.task: scheduled.stream for scheduled in scheduled_tasks}
    seen: dict[
        int, dict[int, int]
    ] = {}  # task -> stream -> how far along `scheduled_tasks` that stream is over once the task is
    latest: dict[int, dict[int, int]] = {}  # the same for the last task of a stream

    def needed(wanted: set[int], have: dict[int, int]) -> list[int]:
        found = []
        for task in sorted(
            wanted, key=place.__getitem__, reverse=True
        ):  # a later task implies earlier ones, never otherwise
            if have.get(stream[task], -1) < place[task]:
                found.append(task)
                _merge(have, seen[task])
        return sorted(found, key=place.__getitem__)

    waits: dict[int, list[int]] = {}
    for scheduled in scheduled_tasks:
        have = dict(latest.get(scheduled.stream, {}))
        waits[scheduled.task] = needed(set(dependencies[scheduled.task]), have)
        seen[scheduled.task] = latest[scheduled.stream] = {**have, scheduled.stream: place[scheduled.task]}
    ends = {max((task for task in place if stream[task] == each), key=place.__getitem__) for each in latest if each}
    return waits, needed(ends, dict(latest.get(0, {})))


def _merge(into: dict[int, int], other: Mapping[int, int]) -> None:
    for stream, far in other.items():
        into[stream] = max(far, into.get(stream, -1))
