"""What is counted: plain numbers of one event loop, so that counting a token costs a fraction of a microsecond.

`metrics.py` draws them in Prometheus' format when somebody asks, `live.py` for the page.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

# vLLM's buckets, so that dashboards made for it show the same; below its first ones a few more for what is faster.
FIRST_TOKEN_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = tuple(mantissa * 10**exponent for exponent in range(7) for mantissa in (1, 2, 5))


class Distribution:
    """A histogram: how many values lie at or below each bound, their sum, and the last few themselves.

    Attributes:
        counts: values by bucket, not cumulative; the last bucket is above every bound.
        recent: the last values, for percentiles of now.
    """

    __slots__ = ("_bounds", "counts", "recent", "sum")

    def __init__(self, bounds: Sequence[float], keep: int = 0) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=keep)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self.recent.append(value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus has them: (upper bound, values at or below it)."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), self.counts, strict=True):
            total += count
            found.append(("+Inf" if math.isinf(bound) else repr(float(bound)), float(total)))
        return found


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that at least so many percent of the values do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


class History:
    """What happened in each of the last seconds.

    Args:
        seconds: how many are kept.
        names: what is added up in a second; all start at 0.
    """

    def __init__(self, seconds: int, names: Sequence[str]) -> None:
        self._seconds = seconds
        self._names = tuple(names)
        self._rows: deque[tuple[int, dict[str, float], list[float]]] = deque(maxlen=seconds + 1)

    def add(self, now: float, values: Iterable[float] = (), **amounts: float) -> None:
        """Add to the second of `now`; `values` are those whose percentiles are wanted."""
        second = math.floor(now)
        if not self._rows or self._rows[-1][0] < second:
            self._rows.append((second, dict.fromkeys(self._names, 0.0), []))
        _, sums, kept = self._rows[-1]
        for name, amount in amounts.items():
            sums[name] += amount
        kept.extend(values)

    def sums(self, now: float) -> dict[str, list[float]]:
        """Each name's amount in each whole second before `now`, oldest first."""
        rows = {second: sums for second, sums, _ in self._rows}
        nothing = dict.fromkeys(self._names, 0.0)
        last = math.floor(now)
        seconds = range(last - self._seconds, last)
        return {name: [rows.get(second, nothing)[name] for second in seconds] for name in self._names}

    def percentiles(self, now: float, percent: float) -> list[float | None]:
        """That percentile of the values of each whole second before `now`; None for a second without one."""
        rows = {second: kept for second, _, kept in self._rows}
        last = math.floor(now)
        return [percentile(rows.get(second, ()), percent) for second in range(last - self._seconds, last)]
