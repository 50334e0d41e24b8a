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

_SLEEP_SECONDS = 0.001
_STALL_MS = 2.0  # milliseconds; below that, waking up on a busy machine takes as long
_TIMEOUT = 10.0
_PROBE_ADDITIONS = 500  # some 20 us, without a look at memory beyond the nearest cache
_SLEEPS_PER_PROBE = 4
_SLOW_FACTOR = 3.0  # times the usual; what runs beside makes it 1.5
_MAX_GAP_SECONDS = 0.1  # seconds between two slow sums of one spell
_MARGIN_SECONDS = 0.02  # seconds before and behind: it comes suddenly, and passes by and by


class SlowPeriod(NamedTuple):
    """When the machine was slow, in seconds of `time.perf_counter`, which all processes of a machine share."""

    begin: float
    end: float


class StallMonitor:
    """A context in which the machine is watched.

    Attributes:
        stats: `longest_ms` that the process overslept and how often it did by more than 2 ms (`over_2_ms`); how often
            the processors were slow (`slow_spells`), and for how long in all (`slow_s`). Empty until the context ends,
            and where the process cannot run.
        slow_periods: in which the machine was slow.
    """

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.slow_periods: list[SlowPeriod] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StallMonitor:
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
            text, _ = self._process.communicate(timeout=_TIMEOUT)
            self.stats, slow_periods = json.loads(text)
            self.slow_periods = [SlowPeriod(*each) for each in slow_periods]
        except (subprocess.TimeoutExpired, ValueError):  # what it saw is no part of the figures
            self._process.kill()
            self._process.wait()


def summary(overslept: Iterable[float], slow_periods: Sequence[SlowPeriod] = ()) -> dict[str, float]:
    """Of naps, each of which was so many seconds too long, and of slow spells."""
    late = [seconds * 1e3 for seconds in overslept]
    return {
        "longest_ms": round(max(late, default=0.0), 3),
        "over_2_ms": sum(each > _STALL_MS for each in late),
        "slow_spells": len(slow_periods),
        "slow_s": round(sum(spell.end - spell.begin for spell in slow_periods), 3),
    }


def find_slow_periods(probes: Sequence[tuple[float, float]]) -> list[SlowPeriod]:
    """When the machine was slow, of the same sum done again and again: (moment, seconds of the processor that it took).

    A single slow one is none: an interrupt does that.
    """
    usual = statistics.median(seconds for _, seconds in probes) if probes else 0.0
    found: list[list[float]] = []
    for moment, seconds in probes:
        if seconds <= _SLOW_FACTOR * usual:
            continue
        if not found or moment - found[-1][-1] > _MAX_GAP_SECONDS:
            found.append([])
        found[-1].append(moment)
    return [SlowPeriod(each[0] - _MARGIN_SECONDS, each[-1] + _MARGIN_SECONDS) for each in found if len(each) > 1]


def _watch() -> tuple[list[float], list[tuple[float, float]]]:
    """Seconds overslept, and sums, until the input ends."""
    overslept, probes, spent, num_sleeps = [], [], 0.0, 0
    last = time.perf_counter()
    print("watching", flush=True)
    while True:
        ended = select.select([sys.stdin], [], [], _SLEEP_SECONDS)[0]
        now = time.perf_counter()
        late = now - last - _SLEEP_SECONDS - spent
        if late > _SLEEP_SECONDS:
            overslept.append(late)
        if ended:
            return overslept, probes
        last, spent, num_sleeps = now, 0.0, num_sleeps + 1
        if num_sleeps % _SLEEPS_PER_PROBE == 0:
            began = time.thread_time()  # not of the wall: that this process had to wait for its turn is another matter
            _run_probe()
            spent = time.thread_time() - began
            probes.append((now, spent))


def _run_probe() -> int:
    total = 0
    for each in range(_PROBE_ADDITIONS):
        total += each
    return total


if __name__ == "__main__":
    overslept_times, probe_times = _watch()
    periods = find_slow_periods(probe_times)
    print(json.dumps([summary(overslept_times, periods), periods]))
