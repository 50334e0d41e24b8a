"""Plain counters against the libraries that define them."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram

from torchweave.serving.engine_client.counters import (
    FIRST_TOKEN_SECONDS,
    BucketHistogram,
    History,
    Percentiles,
    percentile,
)


def test_a_distribution_counts_as_prometheus_does():
    values = np.random.default_rng(0).lognormal(-3, 3, size=500)
    theirs = Histogram("a", "b", buckets=FIRST_TOKEN_SECONDS, registry=CollectorRegistry())
    ours = BucketHistogram(FIRST_TOKEN_SECONDS, num_recent=10)
    for value in [*values.tolist(), *FIRST_TOKEN_SECONDS]:  # the bounds too: they belong to their own bucket
        theirs.observe(value)
        ours.observe(value)
    samples = {sample.labels.get("le", sample.name): sample.value for sample in theirs.collect()[0].samples}
    assert {float(bound): count for bound, count in ours.cumulative()} == {
        float(bound): count for bound, count in samples.items() if not bound.startswith("a_")
    }
    assert ours.count == samples["a_count"] and ours.sum == pytest.approx(samples["a_sum"])
    assert list(ours.recent) == list(FIRST_TOKEN_SECONDS[-10:])


def test_percentiles_are_values_that_occurred():
    values = np.random.default_rng(1).random(37)
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values.tolist(), percent) == np.percentile(values, percent, method="inverted_cdf")
    assert percentile([], 50) is None


def test_a_history_has_a_row_a_second():
    history = History(4, ("a", "b"))
    history.add(10.2, [3.0, 1.0], a=2)
    history.add(10.9, [2.0], a=1, b=5)
    history.add(12.0, [], b=1)
    assert history.sums(13.5) == {"a": [0, 3, 0, 0], "b": [0, 5, 0, 1]}
    assert Percentiles([history], 4, (50, 99)).of(13.5) == [[None, 2.0, None, None], [None, 3.0, None, None]]
    assert history.sums(12.5)["b"] == [0, 0, 5, 0], "the second that is under way is not told"
    assert history.sums(99.0) == {"a": [0] * 4, "b": [0] * 4}
