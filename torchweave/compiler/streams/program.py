"""The program: what each stream does, in the order in which it is launched.

Tasks that follow each other on one stream, with nothing to wait for and nobody waiting in between, are one run. An event is
recorded after a run that another stream waits for, once, and only a wait that does not follow from earlier ones is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchweave.compiler.streams.schedule import Slot


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


def program(slots: Sequence[Slot], before: Sequence[Mapping[int, object]]) -> Program:
    """The program of a schedule; `slots` are in the order of launching."""
    waits, joins = _waits(slots, before)
    signals = {each for found in waits.values() for each in found} | set(joins)
    runs: list[list[Slot]] = []
    latest: dict[int, list[Slot]] = {}  # stream -> its run so far
    for slot in slots:
        run = latest.get(slot.stream)
        if run is None or waits[slot.task] or run[-1].task in signals:
            run = latest[slot.stream] = []
            runs.append(run)
        run.append(slot)
    run_of = {slot.task: index for index, run in enumerate(runs) for slot in run}
    done = (
        Run(
            run[0].stream,
            tuple(slot.task for slot in run),
            tuple(run_of[each] for each in waits[run[0].task]),
            run[-1].task in signals,
        )
        for run in runs
    )
    return Program(tuple(done), tuple(run_of[each] for each in joins))


def _waits(slots: Sequence[Slot], before: Sequence[Mapping[int, object]]) -> tuple[dict[int, list[int]], list[int]]:
    """For each task the tasks of other streams that its stream must wait for first, and those that the caller's must at the
    end: none that other waits imply."""
    place = {slot.task: index for index, slot in enumerate(slots)}
    stream = {slot.task: slot.stream for slot in slots}
    seen: dict[int, dict[int, int]] = {}  # task -> stream -> how far along `slots` that stream is over once the task is
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
    for slot in slots:
        have = dict(latest.get(slot.stream, {}))
        waits[slot.task] = needed(set(before[slot.task]), have)
        seen[slot.task] = latest[slot.stream] = {**have, slot.stream: place[slot.task]}
    ends = {max((task for task in place if stream[task] == each), key=place.__getitem__) for each in latest if each}
    return waits, needed(ends, dict(latest.get(0, {})))


def _merge(into: dict[int, int], other: Mapping[int, int]) -> None:
    for stream, far in other.items():
        into[stream] = max(far, into.get(stream, -1))
