"""Host side of speculation: tokens that were counted in advance and not kept, the number of drafts, and their statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from torchweave.engine.scheduler.request_state import SlotTable
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.ops.slot_state import NOT_EMITTED

_FIRST_SAMPLES = 3  # of steps of a size, before its cost counts as known
_COST_WEIGHT = 1 / 16  # of a step in the running mean of its size
_REQUEST_WEIGHT = 0.1  # of a step in what its requests accept
_MEAN_WEIGHT = 0.02  # of a row of a step in what all requests accept
_MARGIN = 1.02  # least gain of drafts
_PROBE_SHARE = 0.005  # of the time, for steps of another size than the best
_MAX_INTERVAL = 4096  # most steps between two tries


def unused_tokens(step: Step, result: StepResult, table: SlotTable) -> np.ndarray:
    """Tokens of each row of a completed step that were counted as computed when it was built, but not kept."""
    counted = np.where(table.drafting[step.slots], step.query_len, 1)
    return counted - (result.tokens != NOT_EMITTED).sum(axis=1)


class SpeculationCounts:
    """Drafts of all requests since the start; the names are those of vLLM.

    Attributes:
        num_drafts: rows of steps with at least one draft.
        num_draft_tokens: drafts.
        num_accepted_tokens: drafts that were kept.
        num_accepted_tokens_per_pos: int64 [K], the same by the draft's place in its row.
    """

    def __init__(self, most: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_accepted_tokens_per_pos = np.zeros(most, np.int64)

    def as_dict(self) -> dict[str, int | list[int]]:
        return vars(self) | {"num_accepted_tokens_per_pos": self.num_accepted_tokens_per_pos.tolist()}

    def add(self, num_drafts: np.ndarray, lengths: np.ndarray) -> None:
        """Add the rows of a step, which had `num_drafts` drafts and kept `lengths` tokens."""
        accepted = lengths - 1
        self.num_drafts += int(np.count_nonzero(num_drafts))
        self.num_draft_tokens += int(num_drafts.sum())
        self.num_accepted_tokens += int(accepted.sum())
        self.num_accepted_tokens_per_pos += (accepted[:, None] > np.arange(len(self.num_accepted_tokens_per_pos))).sum(
            0
        )


class StepCosts:
    """Measured seconds of decode steps, by rows, rounded up to a power of two, and by tokens of a row.

    Args:
        max_rows: most rows of a step.
        query_lens: tokens of a row in steps with drafts, ascending.
        measured: (rows, tokens of a row, seconds) known before the first step.

    Attributes:
        query_lens: 1 and those with drafts.
    """

    def __init__(
        self, max_rows: int, query_lens: Sequence[int], measured: Iterable[tuple[int, int, float]] = ()
    ) -> None:
        self.query_lens = (1, *query_lens)
        shape = (max(max_rows - 1, 0).bit_length() + 1, len(self.query_lens))
        self._seconds, self._num_samples = np.full(shape, np.inf), np.zeros(shape, np.int64)
        for rows, query_len, seconds in measured:
            self._seconds[self._place(rows, query_len)] = seconds
            self._num_samples[self._place(rows, query_len)] = _FIRST_SAMPLES

    def _place(self, rows: int, query_len: int) -> tuple[int, int]:
        return max(rows - 1, 0).bit_length(), self.query_lens.index(query_len)

    def add(self, rows: int, query_len: int, seconds: float) -> None:
        """Add a step. The least of the first samples counts, since a first run is slow, then a running mean."""
        place = self._place(rows, query_len)
        known, self._num_samples[place] = self._seconds[place], self._num_samples[place] + 1
        if self._num_samples[place] <= _FIRST_SAMPLES:
            self._seconds[place] = min(known, seconds)
        else:  # an interruption counts as a step of twice the time
            self._seconds[place] += (min(seconds, 2 * known) - known) * _COST_WEIGHT

    def of(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a step of `rows` rows by the index of `query_lens`, and which of them are measured."""
        place = self._place(rows, 1)[0]
        return self._seconds[place], self._num_samples[place] >= _FIRST_SAMPLES


class AdaptiveDrafts:
    """Selects the tokens of a row of each decode step: those with the most expected tokens a second, from what steps of that size
    cost and from what each request accepted.

    The other choices are tried from time to time, as seldom as to cost about `_PROBE_SHARE` of the time.

    Args:
        max_slots: requests.
        costs: of steps; `update` adds to them.
        min_interval: least number of steps between two tries.

    Attributes:
        acceptance: float64 [slots, K], the share of a request's steps that kept more than i drafts, as a running mean.
        mean_acceptance: float64 [K], the same over all requests, with which a request begins.
    """

    def __init__(self, max_slots: int, costs: StepCosts, min_interval: int = 8) -> None:
        most = costs.query_lens[-1] - 1
        self.costs = costs
        self.mean_acceptance = 0.5 ** np.arange(1, most + 1)
        self.acceptance = np.tile(self.mean_acceptance, (max_slots, 1))
        self._min_interval = min_interval
        self._since_probe = self._next_probe = 0

    def start(self, slot: int) -> None:
        self.acceptance[slot] = self.mean_acceptance

    def update(self, slots: np.ndarray, query_len: int, num_accepted: np.ndarray) -> None:
        """Add the rows of a step that may have had drafts. slots, num_accepted int [R]."""
        if not slots.size:
            return
        places = query_len - 1
        accepted = num_accepted[:, None] > np.arange(places)
        known = self.acceptance[slots]
        known[:, :places] += (accepted - known[:, :places]) * _REQUEST_WEIGHT
        self.acceptance[slots] = np.minimum.accumulate(known, axis=1)  # places beyond the step's drafts
        self.mean_acceptance[:places] += (accepted.mean(axis=0) - self.mean_acceptance[:places]) * (
            1 - (1 - _MEAN_WEIGHT) ** len(slots)
        )
        self.mean_acceptance[:] = np.minimum.accumulate(self.mean_acceptance)

    def choose(self, slots: np.ndarray, drafting: np.ndarray) -> int:
        """Tokens of a row for a step of `slots`, int [R], of which `drafting`, bool [R], may have drafts; 1: no drafts."""
        query_lens = self.costs.query_lens
        seconds, measured = self.costs.of(len(slots))
        if not measured.all():
            return query_lens[int(np.flatnonzero(~measured)[-1])]
        expected = np.concatenate([[0.0], np.cumsum(self.acceptance[slots[drafting]].sum(axis=0))])
        tokens = len(slots) + expected[np.array(query_lens) - 1]
        rate = tokens / seconds
        rate[1:] /= _MARGIN
        best = int(rate.argmax())
        self._since_probe += 1
        other = (best + 1 + self._next_probe % (len(rate) - 1)) % len(rate)
        lost = seconds[other] / seconds[best] - tokens[other] / tokens[best]  # in steps of the best size
        if self._since_probe < max(self._min_interval, min(lost / _PROBE_SHARE, _MAX_INTERVAL)):
            return query_lens[best]
        self._since_probe, self._next_probe = 0, self._next_probe + 1
        return query_lens[other]
