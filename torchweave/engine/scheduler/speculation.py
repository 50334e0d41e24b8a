"""Host side of speculation: tokens that were counted in advance and not kept, and statistics of drafts."""

from __future__ import annotations

import numpy as np

from torchweave.engine.scheduler.request_state import SlotTable
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.ops.slot_state import NOT_EMITTED


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
