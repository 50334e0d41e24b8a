"""The choice of drafts by measured costs of steps and by what requests accept."""

from __future__ import annotations

import numpy as np
import pytest

from torchweave.engine.scheduler.speculation import AdaptiveDrafts, StepCosts

SLOTS = 64
ALL = np.arange(SLOTS)


def costs(cost_of_draft: float) -> StepCosts:
    """A plain step takes a second, and each draft of each row of the largest batch adds `cost_of_draft`."""
    measured = [
        (rows, query_len, 1 + cost_of_draft * (query_len - 1) * rows / SLOTS)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for query_len in (1, 2, 4)
    ]
    return StepCosts(SLOTS, (2, 4), measured)


def chosen(drafts: AdaptiveDrafts, rows: int, steps: int = 400, share_kept: float | None = None) -> list[int]:
    """The choices for steps of `rows` rows, whose drafts are kept with `share_kept`; None: as at the start."""
    rng, choices = np.random.default_rng(0), []
    for _ in range(steps):
        query_len = drafts.choose(ALL[:rows], np.ones(rows, bool))
        choices.append(query_len)
        if share_kept is not None and query_len > 1:
            kept = np.cumprod(rng.random((rows, query_len - 1)) < share_kept, axis=1).sum(axis=1)
            drafts.update(ALL[:rows], query_len, kept)
    return choices


@pytest.mark.parametrize(("share", "query_len"), [(0.95, 4), (0.0, 1)])
def test_one_request_speculates_where_drafts_are_kept(share: float, query_len: int) -> None:
    drafts = AdaptiveDrafts(SLOTS, costs(4.0))
    choices = chosen(drafts, 1, share_kept=share)
    assert choices[200:].count(query_len) > 180, choices


def test_fewer_drafts_where_only_the_first_is_kept() -> None:
    drafts = AdaptiveDrafts(SLOTS, costs(12.8))  # a draft of one row costs 0.2
    drafts.acceptance[:] = [0.8, 0.1, 0.0]
    assert max(set(choices := chosen(drafts, 1)), key=choices.count) == 2


def test_large_batches_turn_drafts_off() -> None:
    """With the same acceptance, a draft that costs more than it gains is not fed."""
    drafts = AdaptiveDrafts(SLOTS, costs(4.0))
    drafts.acceptance[:] = [0.7, 0.5, 0.35]
    few, many = chosen(drafts, 4), chosen(drafts, SLOTS)
    assert few.count(4) > 380
    assert many.count(1) > 380
    spent = sum(1 + 4.0 * (query_len - 1) for query_len in many) / len(many)
    gained = sum(1 + drafts.acceptance[0, : query_len - 1].sum() for query_len in many) / len(many)
    assert gained / spent > 0.98


def test_rows_that_may_not_draft_gain_nothing() -> None:
    drafts = AdaptiveDrafts(SLOTS, costs(0.5))
    drafts.acceptance[:] = [0.9, 0.8, 0.7]
    one = np.arange(SLOTS) == 3
    choices = [drafts.choose(ALL, one) for _ in range(100)]
    assert choices.count(1) > 95
    assert [drafts.choose(ALL, ~one) for _ in range(100)].count(4) > 90


def test_drafts_are_tried_again_when_they_begin_to_be_kept() -> None:
    drafts = AdaptiveDrafts(SLOTS, costs(6.4))
    assert chosen(drafts, 1, share_kept=0.0)[200:].count(1) > 180
    assert chosen(drafts, 1, share_kept=1.0)[200:].count(4) > 180


def test_sizes_without_a_measured_cost_are_measured_first() -> None:
    drafts = AdaptiveDrafts(8, StepCosts(8, (2, 4)))
    choices = []
    for _ in range(9):
        choices.append(drafts.choose(ALL[:5], np.ones(5, bool)))
        drafts.costs.add(5, choices[-1], {1: 1.0, 2: 5.0, 4: 5.0}[choices[-1]])
    assert sorted(choices) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert drafts.choose(ALL[:8], np.ones(8, bool)) == 1  # 5 and 8 rows count as one size
    assert drafts.choose(ALL[:4], np.ones(4, bool)) == 4


def test_costs_are_running_means_without_outliers() -> None:
    table = StepCosts(4, (3,))
    for seconds in (9.0, 1.0, 3.0):
        table.add(3, 1, seconds)
    assert table.of(4)[0].tolist() == [1.0, np.inf] and table.of(4)[1].tolist() == [True, False]
    table.add(4, 1, 1000.0)
    assert 1 < table.of(3)[0][0] < 1.1
    for _ in range(200):
        table.add(4, 1, 2.0)
    assert table.of(3)[0][0] == pytest.approx(2.0, rel=1e-3)


def test_a_request_begins_with_what_others_accepted() -> None:
    drafts = AdaptiveDrafts(4, costs(1.0))
    for _ in range(300):
        drafts.update(np.array([1]), 4, np.array([1]))
    drafts.start(2)
    np.testing.assert_allclose(drafts.acceptance[2], [1, 0, 0], atol=0.02)
    drafts.update(np.array([2]), 2, np.array([0]))
    assert drafts.acceptance[2, 0] < 0.95 and (np.diff(drafts.acceptance[2]) <= 0).all()
