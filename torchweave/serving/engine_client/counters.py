"""Histograms and per-second history without locks, for one event loop: counting a token takes less than a microsecond.

`metrics/prometheus.py` and `metrics/live.py` format them on demand.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# vLLM's buckets, so that its dashboards work, with additional smaller ones.
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


@dataclass(slots=True)
class BucketHistogram:
    """A histogram with fixed bucket bounds, which also keeps the latest values. msgpack can encode it.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
        num_recent: length of `recent`.
        counts: values per bucket, not cumulative; the last bucket is above every bound.
        recent: the latest values, for percentiles.
    """

    bounds: tuple[float, ...]
    num_recent: int = 0
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    recent: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.recent = deque(self.recent, self.num_recent)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.recent.append(value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @classmethod
    def merge(cls, parts: Sequence[BucketHistogram]) -> BucketHistogram:
        """Sum histograms with the same bounds; keeps the recent values of each."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            first.bounds,
            first.num_recent * len(parts),
            [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)],
            sum(part.sum for part in parts),
            deque(value for part in parts for value in part.recent),
        )

    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative buckets, as in Prometheus: (upper bound, values at or below it)."""
        buckets, total = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if math.isinf(bound) else repr(float(bound)), float(total)))
        return buckets


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Nearest-rank percentile: the smallest value that `percent` of the values do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


@dataclass(slots=True)
class History:
    """Sums and values of each of the last `seconds` seconds. msgpack can encode it.

    Attributes:
        names: of the sums.
        rows: (second, sums, values), oldest first.
    """

    seconds: int
    names: tuple[str, ...]
    rows: deque[tuple[int, dict[str, float], list[float]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rows = deque(self.rows, self.seconds + 1)

    def add(self, now: float, values: Iterable[float] = (), **amounts: float) -> None:
        """Add amounts, and values for percentiles, to the second of `now`."""
        second = math.floor(now)
        if not self.rows or self.rows[-1][0] < second:
            self.rows.append((second, dict.fromkeys(self.names, 0.0), []))
        _, sums, row_values = self.rows[-1]
        for name, amount in amounts.items():
            sums[name] += amount
        row_values.extend(values)

    def sums(self, now: float) -> dict[str, list[float]]:
        """Sums by name in each full second before `now`, oldest first."""
        rows = {second: sums for second, sums, _ in self.rows}
        zeros = dict.fromkeys(self.names, 0.0)
        last = math.floor(now)
        seconds = range(last - self.seconds, last)
        return {name: [rows.get(second, zeros)[name] for second in seconds] for name in self.names}

    def values(self, second: int) -> Sequence[float]:
        """The values of a second."""
        return next((values for at, _, values in reversed(self.rows) if at == second), ())


class Percentiles:
    """Percentiles of each of the last full seconds over several histories, computed once for each second."""

    def __init__(self, histories: Sequence[History], seconds: int, percents: Sequence[float]) -> None:
        self._histories = histories
        self._seconds = seconds
        self._percents = percents
        self._by_second: dict[int, list[float | None]] = {}

    def of(self, now: float) -> list[list[float | None]]:
        """Values of each percentile for every full second before `now`, oldest first; None for seconds without values."""
        last = math.floor(now)
        seconds = range(last - self._seconds, last)
        self._by_second = {second: self._by_second.get(second) or self._of_second(second) for second in seconds}
        return [[self._by_second[second][number] for second in seconds] for number in range(len(self._percents))]

    def _of_second(self, second: int) -> list[float | None]:
        values = [value for history in self._histories for value in history.values(second)]
        return [percentile(values, percent) for percent in self._percents]
