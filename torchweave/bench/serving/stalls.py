"""Whether the machine itself stood still, or was slow, while it was measured: a process that does next to nothing tells.

Where cores are lent by a hypervisor, they are taken away for some milliseconds now and then: a process that sleeps a millisecond at
a time oversleeps. Or the processors run at a fraction of their speed: the same few hundred additions take ten times as long, then
five, then three, until a tenth of a second later all is as before, whatever else runs. So does a processor whose clock is pulled
down at once, to spare its power supply, and let up by and by. Clients see both as a server that stalls, and p99 between tokens
tells of nothing else. Run as a script, with nothing but the standard library, this file is that process: it watches until its
input ends, and prints what it saw.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

_NAP = 0.001
_LONG = 2.0  # milliseconds; below that, waking up on a busy machine takes as long
_PATIENCE = 10.0
_ADDITIONS = 500  # some 20 us, without a look at memory beyond the nearest cache
_NAPS_A_SUM = 4
_SLOW = 3.0  # times the usual; what runs beside makes it 1.5
_TOGETHER = 0.1  # seconds between two slow sums of one spell
_AROUND = 0.02  # seconds before and behind: it comes suddenly, and passes by and by


class Spell(NamedTuple):
    """When the machine was slow, in seconds of `time.perf_counter`, which all processes of a machine share."""

    begin: float
    end: float


class Watch:
    """A context in which the machine is watched.

    Attributes:
        seen: `longest_ms` that the process overslept and how often it did by more than 2 ms (`over_2_ms`); how often
            the processors were slow (`slow_spells`), and for how long in all (`slow_s`). Empty until the context ends,
            and where the process cannot run.
        spells: in which the machine was slow.
    """

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.spells: list[Spell] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watch:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        try:
            text, _ = self._process.communicate(timeout=_PATIENCE)
            self.seen, spells = json.loads(text)
            self.spells = [Spell(*each) for each in spells]
        except (subprocess.TimeoutExpired, ValueError):  # what it saw is no part of the figures
            self._process.kill()
            self._process.wait()


def summary(overslept: Iterable[float], spells: Sequence[Spell] = ()) -> dict[str, float]:
    """Of naps, each of which was so many seconds too long, and of slow spells."""
    late = [seconds * 1e3 for seconds in overslept]
    return {
        "longest_ms": round(max(late, default=0.0), 3),
        "over_2_ms": sum(each > _LONG for each in late),
        "slow_spells": len(spells),
        "slow_s": round(sum(spell.end - spell.begin for spell in spells), 3),
    }


def slow_spells(sums: Sequence[tuple[float, float]]) -> list[Spell]:
    """When the machine was slow, of the same sum done again and again: (moment, seconds of the processor that it took).

    A single slow one is none: an interrupt does that.
    """
    usual = statistics.median(seconds for _, seconds in sums) if sums else 0.0
    found: list[list[float]] = []
    for moment, seconds in sums:
        if seconds <= _SLOW * usual:
            continue
        if not found or moment - found[-1][-1] > _TOGETHER:
            found.append([])
        found[-1].append(moment)
    return [Spell(each[0] - _AROUND, each[-1] + _AROUND) for each in found if len(each) > 1]


def _watch() -> tuple[list[float], list[tuple[float, float]]]:
    """Seconds overslept, and sums, until the input ends."""
    overslept, sums, spent, naps = [], [], 0.0, 0
    last = time.perf_counter()
    print("watching", flush=True)
    while True:
        ended = select.select([sys.stdin], [], [], _NAP)[0]
        now = time.perf_counter()
        late = now - last - _NAP - spent
        if late > _NAP:
            overslept.append(late)
        if ended:
            return overslept, sums
        last, spent, naps = now, 0.0, naps + 1
        if naps % _NAPS_A_SUM == 0:
            began = time.thread_time()  # not of the wall: that this process had to wait for its turn is another matter
            _add()
            spent = time.thread_time() - began
            sums.append((now, spent))


def _add() -> int:
    total = 0
    for each in range(_ADDITIONS):
        total += each
    return total


if __name__ == "__main__":
    seen_late, seen_sums = _watch()
    seen_spells = slow_spells(seen_sums)
    print(json.dumps([summary(seen_late, seen_spells), seen_spells]))
