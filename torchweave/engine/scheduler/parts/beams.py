"""Beam searches: one request each, with a slot per beam.

Beams share the blocks of their common prefix; a block is copied only when two beams continue within it. The next step of a search
needs the result of its last one, so a search skips steps until that result is there: with one step of run-ahead it takes part in
every second step. Other requests do not wait for it.

A search that starts, or resumes after a pause, prefills its beams one after another; each begins with the full blocks that it
shares with an earlier one. A recurrent state holds all tokens of its sequence: a fork copies it, and with such states a beam that
is prefilled begins with its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import NO_TOKENS, InferenceRequest
from torchweave.engine.sampling.beam_search import BeamSearch, Continuations, num_candidates
from torchweave.engine.scheduler.parts.base import StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState, SlotTable
from torchweave.engine.scheduler.running_set import SlotGroup
from torchweave.engine.scheduler.step import Payload, Step, StepLogprobs, StepResult
from torchweave.ops.slot_state import SlotUpdates


@dataclass(frozen=True)
class BeamRows(Payload):
    """Rows of beams.

    Attributes:
        extra_rows: decode rows beyond one per request.
        copies: KV cache blocks to copy before the step, as (sources, targets); None for none.
    """

    extra_rows: int
    copies: tuple[np.ndarray, np.ndarray] | None


@dataclass
class BeamGroup:
    """One running search.

    Attributes:
        state: its request.
        search: its beams and hypotheses.
        slots: `beam_width` slots; the first one stands for the request.
        members: the slot of each beam.
        prefill_beam: index of the beam in prefill; None once all are computed.
        forks: for each beam of the next step, the slot that it continues, and whether it keeps this slot. None while a result
            is pending or beams prefill.
        pending_release: the search is finished or paused.
        shares_blocks: beams that are prefilled share the full blocks of their common prefix.
    """

    state: RequestState
    search: BeamSearch
    slots: list[int]
    members: list[int]
    prefill_beam: int | None = 0
    forks: list[tuple[int, bool]] | None = None
    pending_release: bool = False
    shares_blocks: bool = True
    _continuations: dict[int, Continuations] = field(default_factory=dict)

    @property
    def leader(self) -> int:
        return self.slots[0]

    @property
    def in_prefill(self) -> bool:
        return self.prefill_beam is not None

    @property
    def num_rows(self) -> int:
        """Rows that the search takes in the next step."""
        return len(self.forks) if self.forks is not None else 0

    @property
    def continued_slots(self) -> list[int]:
        """Slots that their beam keeps in the next step."""
        return [slot for slot, is_continued in self.forks or () if is_continued]

    def sequence(self, beam: int) -> np.ndarray:
        return np.concatenate([self.state.prompt, self.search.beams[beam].tokens])

    def update(self, slot: int, continuations: Continuations) -> bool:
        """Add the continuations of the beam in `slot`; returns True when they were the last ones and the search advanced."""
        self._continuations[self.members.index(slot)] = continuations
        if len(self._continuations) < len(self.search.beams):
            return False
        parents = self.search.advance([self._continuations[beam] for beam in range(len(self._continuations))])
        self._continuations.clear()
        continued: set[int] = set()
        self.forks = []
        for slot in (self.members[parent] for parent in parents):
            self.forks.append((slot, slot not in continued))
            continued.add(slot)
        return True

    def next_prefill_slot(self, slots: SlotTable, kv: BlockManager, updates: SlotUpdates) -> int | None:
        """Begin the prefill of the beam after the one in prefill; returns its slot, or None after the last beam."""
        assert self.prefill_beam is not None
        beam = self.prefill_beam + 1
        if beam == len(self.search.beams):
            self.prefill_beam = None
            return None
        self.prefill_beam = beam
        sequence, child = self.sequence(beam), self.members[beam]
        common, parent = max(
            (_common_length(self.sequence(other), sequence), self.members[other]) for other in range(beam)
        )
        num_blocks = min(common, len(sequence) - 1) // kv.block_size
        if not (self.shares_blocks and kv.covers_window(parent, num_blocks)):
            num_blocks = 0  # the parent's state is that of its end, or its blocks in the window were freed
        _fork(slots, kv, updates, parent, child, num_blocks)
        slots.start_prefill(child, sequence, num_blocks * kv.block_size)
        return child

    def blocks_needed(self, slots: SlotTable, kv: BlockManager) -> int:
        """Logical blocks that the search needs for its next step."""
        if self.forks is None:
            return 0
        assert self.forks, "a running search has beams"
        continued = np.array(self.continued_slots)
        num_forks = len(self.forks) - len(continued)  # each into a block of its own
        return int(kv.blocks_needed(continued, slots.num_computed[continued] + 1).sum()) + num_forks

    def assign_slots(self, slots: SlotTable, kv: BlockManager, updates: SlotUpdates) -> list[tuple[int, int]]:
        """Give each beam of the next step a slot with the blocks of the beam that it continues; returns (parent slot, slot) of
        each fork."""
        assert self.forks is not None
        num_tokens = int(slots.num_computed[self.forks[0][0]])
        continued, forked = set(self.continued_slots), []
        free_slots = [slot for slot in self.slots if slot not in continued]
        members = []
        for slot, is_continued in self.forks:
            members.append(slot if is_continued else free_slots.pop())
            if not is_continued:
                _fork(slots, kv, updates, slot, members[-1], num_tokens // kv.block_size)
                slots.num_computed[members[-1]] = num_tokens
                forked.append((slot, members[-1]))
        updates.set("last_token", members, np.array([beam.tokens[-1] for beam in self.search.beams]))
        updates.set("position", members, num_tokens)
        self.members, self.forks = members, None
        return forked


class BeamsPart(StepPart):
    """Runs beam searches; it reads the log-probabilities of their rows, the result of the part `logprobs`."""

    name = "beams"

    def rejection_reason(self, request: InferenceRequest) -> str:
        width, limits = request.sampling.beam_width, self.host.limits
        if width == 1:
            return ""
        if request.images:
            return "Beam search is not supported for prompts with images; set beam_width to 1."
        if limits.max_beam_width is not None and width > limits.max_beam_width:
            return f"beam_width={width} is above {limits.max_beam_width}, the maximum beam width of this batch manager; lower it."
        if width > limits.max_batch_size:
            return (
                f"beam_width={width} needs {width} rows in a step, but max_batch_size is {limits.max_batch_size}; lower beam_width "
                "or raise max_batch_size."
            )
        if request.streaming:
            return "A beam search has no answer before its end, so it cannot be streamed; set streaming to False."
        return ""

    def add(self, state: RequestState) -> None:
        params = state.request.sampling
        if params.beam_width > 1:
            max_tokens = self.host.limits.last_position(state.request) + 1 - len(state.prompt)
            state.search = BeamSearch(params, frozenset(state.stops), max_tokens)
            state.num_logprobs = max(num_candidates(params, len(state.stops)), state.num_logprobs)
            state.host_stop_ids = frozenset()

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        """Give the search in `slot` the slots of its other beams."""
        if state.search is None:
            return False
        slots, kv, limits = self.host.running.slots, self.host.kv, self.host.limits
        limit, shares_blocks = int(slots.limit[slot]), not limits.has_recurrent_states
        num_shared_blocks = len(state.prompt) // kv.block_size if shares_blocks else 0
        members = [slot]
        for _ in range(state.request.sampling.beam_width - 1):
            members.append(slots.add_beam(slot, limit))
            kv.reserve_fork(members[-1], limit, num_shared_blocks)
        slots.group[slot] = slot
        beams = members[: len(state.search.beams)]
        self.host.running.groups[slot] = BeamGroup(state, state.search, members, beams, shares_blocks=shares_blocks)
        return True

    def release(self, slot: int) -> None:
        """A search that is paused goes on from its beams."""
        state = self.host.running.slots.state_of(slot)
        if state.search is not None and state.reason is None:
            state.generated = state.search.beams[0].tokens

    def add_rows(self, groups: Sequence[SlotGroup]) -> tuple[np.ndarray, Sequence[tuple[int, int]]]:
        slots, kv, updates = self.host.running.slots, self.host.kv, self.host.updates
        searches = [group for group in groups if isinstance(group, BeamGroup)]
        forks = [fork for group in searches for fork in group.assign_slots(slots, kv, updates)]
        return np.array([slot for group in searches for slot in group.members], np.int32), forks

    def payload(self, rows: StepRows) -> BeamRows | None:
        running = self.host.running
        for leader in set(running.slots.group[rows.slots].tolist()) - {-1}:
            # All slots of a search are kept until its step has completed.
            running.slots.last_step_index[running.groups[leader].slots] = rows.index
        copies = self._block_copies(rows.forks)
        return BeamRows(rows.extra_rows, copies) if rows.extra_rows or copies else None

    def _block_copies(self, forks: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray] | None:
        """Blocks to copy for forked slots: last blocks that are not full; None if all are full."""
        if not forks:
            return None
        kv = self.host.kv
        parents, children = np.array(forks).T
        num_tokens = self.host.running.slots.num_computed[children] - 1  # before the step
        partial = num_tokens % kv.block_size > 0
        if not partial.any():
            return None
        block_indices = (num_tokens // kv.block_size)[partial]
        tables = kv.table[:, parents[partial], block_indices], kv.table[:, children[partial], block_indices]
        return tables[0].ravel(), tables[1].ravel()

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        running = self.host.running
        searching = running.slots.group[step.slots[rows]] >= 0
        if not searching.any():
            return rows
        logprobs: StepLogprobs = result.parts["logprobs"]
        entry_of_row = {int(row): i for i, row in enumerate(logprobs.rows)}
        finished = []
        for row in rows[searching].tolist():
            slot, at = int(step.slots[row]), entry_of_row[row]
            group = running.groups[int(running.slots.group[slot])]
            assert isinstance(group, BeamGroup)
            count = group.state.num_logprobs
            if group.update(slot, Continuations(logprobs.top_values[at][:count], logprobs.top_ids[at][:count])):
                if group.search.finished:
                    finished.append(group)
                else:
                    _free_dropped_beams(running.slots, self.host.kv, group)
        for group in finished:
            self.host.finish(group.leader, group.search.best()[0].finish_reason)
        return rows[~searching]

    def answer(self, state: RequestState, fields: dict[str, Any]) -> None:
        if state.search is None or state.error:
            return
        beams = state.search.best("cancelled" if state.reason == "cancelled" else None)
        if beams:  # not stopped before its first step
            fields |= {"token_ids": beams[0].token_ids, "logprobs": beams[0].logprobs, "beams": beams}
        else:
            fields |= {"token_ids": NO_TOKENS, "num_cached_tokens": 0}


def _fork(
    slots: SlotTable, kv: BlockManager, updates: SlotUpdates, parent: int, child: int, num_logical_blocks: int
) -> None:
    """Let slot `child` begin with the first blocks of `parent`, all full."""
    grant = kv.fork(parent, child, num_logical_blocks)
    updates.set_block_table(grant.slots, grant.block_indices, grant.blocks)
    kv.reserve(child, int(slots.limit[child]))


def _free_dropped_beams(slots: SlotTable, kv: BlockManager, group: BeamGroup) -> None:
    """Free the blocks of beams that ended, and reserve what their slots may need again."""
    assert group.forks is not None
    continued = {slot for slot, _ in group.forks}
    num_shared_blocks = int(slots.num_computed[group.forks[0][0]]) // kv.block_size
    for slot in set(group.slots) - continued:
        kv.free(slot)
        kv.reserve_fork(slot, int(slots.limit[slot]), num_shared_blocks)


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix of two sequences of equal length."""
    different = np.flatnonzero(one != other)
    return int(different[0]) if different.size else len(one)


PART = BeamsPart
