"""Drafts of speculation: how many a step has, what a draft model lacks, and tokens that were counted but not kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows, StoredRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.speculation import unused_tokens
from torchweave.engine.scheduler.step import Payload, Step, StepResult
from torchweave.ops.slot_state import NOT_EMITTED


@dataclass(frozen=True)
class CatchUp(Payload):
    """Most tokens of a row that a draft model lacks, to be computed before it proposes drafts."""

    num_tokens: int


class DraftsPart(StepPart):
    """Selects the tokens of a row, `Step.query_len`. Its result is int32 [rows], the drafts of each row."""

    name = "drafts"

    @classmethod
    def needed(cls, host: Host) -> bool:
        return host.limits.query_len > 1

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._adaptive = host.resources.adaptive_drafts

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        """Upload the token history for the drafter, and the last position that may have a draft."""
        table, updates, limits = self.host.running.slots, self.host.updates, self.host.limits
        drafting = not (state.search is not None or table.needs_host_work[slot] or state.processor_flags)
        for each in self.host.running.slots_of(slot):
            table.drafting[each] = drafting
            updates.set("draft_limit", each, int(table.limit[slot]) - 1 if drafting else -1)
            updates.set("draft_computed", each, hit.num_blocks * self.host.kv.block_size)
            if drafting or limits.token_shift:  # a head reads the tokens of every prompt there
                updates.set_history(each, state.prefill)
            if self._adaptive is not None:
                self._adaptive.start(each)
        return True

    def query_len(self, decoding: np.ndarray) -> int:
        """1 without a request that may have drafts, or with too many rows."""
        limits = self.host.limits
        if len(decoding) > limits.max_drafting_rows:
            return 1
        drafting = self.host.running.slots.drafting[decoding]
        if not drafting.any():
            return 1
        return self._adaptive.choose(decoding, drafting) if self._adaptive else limits.query_len

    def payload(self, rows: StepRows) -> CatchUp | None:
        if not self.host.limits.drafts_by_model:
            return None
        missing = self._catch_up(rows.decode_rows, rows.query_len)
        return CatchUp(missing) if missing else None

    def _catch_up(self, decode_rows: np.ndarray, query_len: int) -> int:
        """Most tokens of a row that a draft model lacks beyond those that it takes in the step; enters those that it will lack."""
        table = self.host.running.slots
        if query_len == 1:
            table.draft_gap[decode_rows] += 1
            return 0
        gap = int(table.draft_gap[decode_rows[table.drafting[decode_rows]]].max(initial=0))
        # The last draft of a row that keeps all; a head lacks all tokens of the step.
        shift = self.host.limits.token_shift
        table.draft_gap[decode_rows] = query_len if shift else 1
        return max(gap + 1 - shift - query_len, 0)

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        adaptive, decode_only = self._adaptive, not (step.chunks or self.name in step.parts)
        if adaptive is not None and result.seconds is not None and decode_only:
            adaptive.costs.add(step.num_rows, step.query_len, result.seconds)
        if step.query_len > 1:
            lengths = (result.tokens[rows] != NOT_EMITTED).sum(axis=1)
            self.host.speculation.add(result.parts[self.name][rows], lengths)
            if adaptive is not None:
                slots = step.slots[rows]
                drafting = self.host.running.slots.drafting[slots]
                adaptive.update(slots[drafting], step.query_len, lengths[drafting] - 1)
        return rows

    def stored(self, rows: StoredRows) -> None:
        step, running = rows.step, self.host.running
        if step.query_len > 1 and running.take_back(step.slots, unused_tokens(step, rows.result, running.slots)):
            running.steps_before_alloc = 0


PART = DraftsPart
