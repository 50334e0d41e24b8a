"""Detect stalls and slow periods of the machine during a measurement, with a nearly idle process.

Hypervisors deschedule cores for milliseconds: a process that sleeps 1 ms at a time oversleeps. Processors may also throttle
abruptly: a few hundred additions take ten times as long, then five, then three, and recover after 0.1 s, whatever else runs.
Clients see both as server stalls, which dominate the p99 inter-token latency. This file, run as a script with the standard
library only, is that process: it samples until its input ends and prints the result.
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
_STALL_MS = 2.0  # milliseconds; shorter delays are normal on a busy machine
_TIMEOUT = 10.0
_PROBE_ADDITIONS = 500  # about 20 us, without memory access beyond L1
_SLEEPS_PER_PROBE = 4
_SLOW_FACTOR = 3.0  # times the median; a busy sibling core causes 1.5
_MAX_GAP_SECONDS = 0.1  # seconds between two slow probes of a period
_MARGIN_SECONDS = 0.02  # seconds added before and after


class SlowPeriod(NamedTuple):
    """A period of throttling, in seconds of `time.perf_counter`, a clock shared by all processes."""

    begin: float
    end: float


class StallMonitor:
    """A context in which a child process monitors the machine.

    Attributes:
        stats: longest oversleep (`longest_ms`), oversleeps above 2 ms (`over_2_ms`), number and total seconds of slow
            periods (`slow_spells`, `slow_s`). Empty until the context ends, or if the child fails.
        slow_periods: the slow periods.
    """

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.slow_periods: list[SlowPeriod] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StallMonitor:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # wait for its start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        try:
            text, _ = self._process.communicate(timeout=_TIMEOUT)
            self.stats, slow_periods = json.loads(text)
            self.slow_periods = [SlowPeriod(*each) for each in slow_periods]
        except (subprocess.TimeoutExpired, ValueError):  # optional data: ignore the failure
            self._process.kill()
            self._process.wait()


def summary(wake_delays: Iterable[float], slow_periods: Sequence[SlowPeriod] = ()) -> dict[str, float]:
    """Statistics of oversleeps (seconds) and slow periods."""
    late = [seconds * 1e3 for seconds in wake_delays]
    return {
        "longest_ms": round(max(late, default=0.0), 3),
        "over_2_ms": sum(each > _STALL_MS for each in late),
        "slow_spells": len(slow_periods),
        "slow_s": round(sum(period.end - period.begin for period in slow_periods), 3),
    }


def find_slow_periods(probes: Sequence[tuple[float, float]]) -> list[SlowPeriod]:
    """Slow periods from probes (time, CPU seconds of a fixed computation); a single slow probe may be an interrupt."""
    median = statistics.median(seconds for _, seconds in probes) if probes else 0.0
    groups: list[list[float]] = []
    for probed_at, seconds in probes:
        if seconds <= _SLOW_FACTOR * median:
            continue
        if not groups or probed_at - groups[-1][-1] > _MAX_GAP_SECONDS:
            groups.append([])
        groups[-1].append(probed_at)
    return [SlowPeriod(each[0] - _MARGIN_SECONDS, each[-1] + _MARGIN_SECONDS) for each in groups if len(each) > 1]


def _watch() -> tuple[list[float], list[tuple[float, float]]]:
    """Oversleeps in seconds, and probes, until the input ends."""
    wake_delays, probes, spent, num_sleeps = [], [], 0.0, 0
    last = time.perf_counter()
    print("watching", flush=True)
    while True:
        ended = select.select([sys.stdin], [], [], _SLEEP_SECONDS)[0]
        now = time.perf_counter()
        late = now - last - _SLEEP_SECONDS - spent
        if late > _SLEEP_SECONDS:
            wake_delays.append(late)
        if ended:
            return wake_delays, probes
        last, spent, num_sleeps = now, 0.0, num_sleeps + 1
        if num_sleeps % _SLEEPS_PER_PROBE == 0:
            began = time.thread_time()  # CPU time, which excludes descheduling
            _run_probe()
            spent = time.thread_time() - began
            probes.append((now, spent))


def _run_probe() -> int:
    total = 0
    for each in range(_PROBE_ADDITIONS):
        total += each
    return total


if __name__ == "__main__":
    delays, probe_times = _watch()
    periods = find_slow_periods(probe_times)
    print(json.dumps([summary(delays, periods), periods]))
