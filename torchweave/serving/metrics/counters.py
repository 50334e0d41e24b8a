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


class BucketHistogram:
    """A histogram: how many values lie at or below each bound, their sum, and the last few themselves.

    Attributes:
        counts: values by bucket, not cumulative; the last bucket is above every bound.
        recent: the last values, for percentiles of now.
    """

    __slots__ = ("_bounds", "_num_recent", "counts", "recent", "sum")

    def __init__(self, bounds: Sequence[float], num_recent: int = 0) -> None:
        self._bounds = bounds
        self._num_recent = num_recent
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=num_recent)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self.recent.append(value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @classmethod
    def merge(cls, parts: Sequence[BucketHistogram]) -> BucketHistogram:
        """The values of several distributions with the same bounds; the last few of each are kept."""
        first = parts[0]
        if len(parts) == 1:
            return first
        found = cls(first._bounds, first._num_recent * len(parts))
        found.counts = [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)]
        found.sum = sum(part.sum for part in parts)
        for part in parts:
            found.recent.extend(part.recent)
        return found

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

    def values(self, second: int) -> Sequence[float]:
        """The values of a second."""
        return next((kept for at, _, kept in reversed(self._rows) if at == second), ())


class Percentiles:
    """Percentiles of the values of each of the last whole seconds, over several histories.

    A second that is over stays as it is: its values are sorted once.
    """

    def __init__(self, histories: Sequence[History], seconds: int, percents: Sequence[float]) -> None:
        self._histories = histories
        self._seconds = seconds
        self._percents = percents
        self._by_second: dict[int, list[float | None]] = {}

    def of(self, now: float) -> list[list[float | None]]:
        """For each percentile that of every whole second before `now`, oldest first; None for a second without a value."""
        last = math.floor(now)
        seconds = range(last - self._seconds, last)
        self._by_second = {second: self._by_second.get(second) or self._of_second(second) for second in seconds}
        return [[self._by_second[second][number] for second in seconds] for number in range(len(self._percents))]

    def _of_second(self, second: int) -> list[float | None]:
        values = [value for history in self._histories for value in history.values(second)]
        return [percentile(values, percent) for percent in self._percents]
