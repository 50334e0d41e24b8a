"""The program: what each stream does, in the order in which it is launched.

Tasks that follow each other on one stream, with nothing to wait for and nobody waiting in between, are one run. An event is
recorded after a run that another stream waits for, once, and only a wait that does not follow from earlier ones is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchweave.compile.streams.schedule import Slot


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


@dataclass
class _Open:
    stream: int
    tasks: list[int]
    waits: list[int]
    is_closed: bool = False


def program(slots: Sequence[Slot], before: Sequence[Mapping[int, object]]) -> Program:
    """The program of a schedule; `slots` are in the order of launching."""
    stream_of = {slot.task: slot.stream for slot in slots}
    awaited = {
        earlier for slot in slots for earlier in before[slot.task] if stream_of[earlier] != slot.stream
    }
    runs: list[_Open] = []
    run_of: dict[int, int] = {}
    latest: dict[int, int] = {}  # stream -> its run so far
    seen: dict[int, dict[int, int]] = {}  # run -> stream -> the last of its runs that is over when the run begins
    for slot in slots:
        known = _known(seen, latest.get(slot.stream), slot.stream)
        waits = _needed({run_of[each] for each in before[slot.task]}, slot.stream, runs, known, seen)
        current = latest.get(slot.stream)
        if current is None or waits or runs[current].is_closed:
            current = len(runs)
            runs.append(_Open(slot.stream, [], waits))
            seen[current] = known
            for each in waits:
                _merge(known, _known(seen, each, runs[each].stream))
            latest[slot.stream] = current
        runs[current].tasks.append(slot.task)
        run_of[slot.task] = current
        runs[current].is_closed = slot.task in awaited
    ends = [run for stream, run in sorted(latest.items()) if stream]
    joins = _needed(set(ends), 0, runs, _known(seen, latest.get(0), 0), seen)
    signals = {each for run in runs for each in run.waits} | set(joins)
    done = (Run(run.stream, tuple(run.tasks), tuple(run.waits), index in signals) for index, run in enumerate(runs))
    return Program(tuple(done), tuple(joins))


def _known(seen: Mapping[int, dict[int, int]], run: int | None, stream: int) -> dict[int, int]:
    """For each stream the last run that is over once `run` is."""
    return {} if run is None else {**seen[run], stream: run}


def _merge(into: dict[int, int], other: Mapping[int, int]) -> None:
    for stream, run in other.items():
        into[stream] = max(run, into.get(stream, -1))


def _needed(
    wanted: set[int], stream: int, runs: Sequence[_Open], known: Mapping[int, int], seen: Mapping[int, dict[int, int]]
) -> list[int]:
    """The runs that must be waited for so that all of `wanted` are over: those that nothing else implies."""
    have, waits = dict(known), []
    for run in sorted(wanted, reverse=True):  # a later run implies earlier ones, never the other way round
        if runs[run].stream != stream and have.get(runs[run].stream, -1) < run:
            waits.append(run)
            _merge(have, _known(seen, run, runs[run].stream))
    return sorted(waits)
