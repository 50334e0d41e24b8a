"""Running beam searches: one request each, with a slot per beam.

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

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.request import NO_TOKENS, Output, Response
from torchweave.engine.sampling.beam_search import BeamSearch, Continuations
from torchweave.engine.scheduler.request_state import RequestState, SlotTable
from torchweave.engine.scheduler.step import StepLogprobs
from torchweave.ops.slot_state import SlotUpdates


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
    """

    state: RequestState
    search: BeamSearch
    slots: list[int]
    members: list[int]
    prefill_beam: int | None = 0
    forks: list[tuple[int, bool]] | None = None
    pending_release: bool = False
    _continuations: dict[int, Continuations] = field(default_factory=dict)

    @property
    def leader(self) -> int:
        return self.slots[0]

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


class BeamSearches:
    """All running searches.

    Args:
        has_recurrent_states: the model has recurrent layers.

    Attributes:
        groups: searches by their first slot.
    """

    def __init__(self, has_recurrent_states: bool = False) -> None:
        self.groups: dict[int, BeamGroup] = {}
        self._has_recurrent_states = has_recurrent_states

    # -- before a step -------------------------------------------------------------------------------------------------

    def start(self, slots: SlotTable, kv: BlockManager, leader: int, state: RequestState) -> BeamGroup:
        """Give the search in slot `leader` the slots of its other beams."""
        assert state.search is not None
        limit = int(slots.limit[leader])
        num_shared_blocks = 0 if self._has_recurrent_states else len(state.prompt) // kv.block_size
        members = [leader]
        for _ in range(state.request.sampling.beam_width - 1):
            members.append(slots.add_beam(leader, limit))
            kv.reserve_fork(members[-1], limit, num_shared_blocks)
        slots.group[leader] = leader
        group = self.groups[leader] = BeamGroup(state, state.search, members, members[: len(state.search.beams)])
        return group

    def prefill_next_beam(self, slots: SlotTable, kv: BlockManager, updates: SlotUpdates, slot: int) -> int | None:
        """Begin the prefill of the beam after the one in `slot`; returns its slot, or None after the last beam."""
        group = self.groups[int(slots.group[slot])]
        assert group.prefill_beam is not None
        beam = group.prefill_beam + 1
        if beam == len(group.search.beams):
            group.prefill_beam = None
            return None
        group.prefill_beam = beam
        sequence, child = group.sequence(beam), group.members[beam]
        common, parent = max(
            (_common_length(group.sequence(other), sequence), group.members[other]) for other in range(beam)
        )
        num_blocks = min(common, len(sequence) - 1) // kv.block_size
        if self._has_recurrent_states or not kv.covers_window(parent, num_blocks):
            num_blocks = 0  # the parent's state is that of its end, or its blocks in the window were freed
        _fork(slots, kv, updates, parent, child, num_blocks)
        slots.start_prefill(child, sequence, num_blocks * kv.block_size)
        return child

    def blocks_needed(self, slots: SlotTable, kv: BlockManager, group: BeamGroup) -> int:
        """Logical blocks that the search needs for its next step."""
        if group.forks is None:
            return 0
        assert group.forks, "a running search has beams"
        continued = np.array(group.continued_slots)
        num_forks = len(group.forks) - len(continued)  # each into a block of its own
        return int(kv.blocks_needed(continued, slots.num_computed[continued] + 1).sum()) + num_forks

    def assign_slots(
        self, slots: SlotTable, kv: BlockManager, updates: SlotUpdates, groups: Sequence[BeamGroup]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Give each beam of the next step a slot with the blocks of the beam that it continues.

        Returns:
            int32, the slots; and (parent slot, slot) of each fork.
        """
        rows: list[int] = []
        forked: list[tuple[int, int]] = []
        for group in groups:
            assert group.forks is not None
            num_tokens = int(slots.num_computed[group.forks[0][0]])
            continued = set(group.continued_slots)
            free_slots = [slot for slot in group.slots if slot not in continued]
            members = []
            for slot, is_continued in group.forks:
                members.append(slot if is_continued else free_slots.pop())
                if not is_continued:
                    _fork(slots, kv, updates, slot, members[-1], num_tokens // kv.block_size)
                    slots.num_computed[members[-1]] = num_tokens
                    forked.append((slot, members[-1]))
            updates.set("last_token", members, np.array([beam.tokens[-1] for beam in group.search.beams]))
            updates.set("position", members, num_tokens)
            group.members, group.forks = members, None
            rows += members
        return np.array(rows, np.int32), forked

    def mark_scheduled(self, slots: SlotTable, rows: np.ndarray, index: int) -> None:
        """Keep all slots of the searches in a step until it has completed."""
        for leader in set(slots.group[rows].tolist()) - {-1}:
            slots.last_step_index[self.groups[leader].slots] = index

    # -- after a step --------------------------------------------------------------------------------------------------

    def update(
        self, slots: SlotTable, kv: BlockManager, beam_slots: np.ndarray, rows: np.ndarray, logprobs: StepLogprobs
    ) -> list[BeamGroup]:
        """Process the rows of a step that belong to searches; returns the finished searches."""
        entry_of_row = {int(row): i for i, row in enumerate(logprobs.rows)}
        finished = []
        for slot, row in zip(beam_slots.tolist(), rows.tolist(), strict=True):
            group, at = self.groups[int(slots.group[slot])], entry_of_row[row]
            count = group.state.num_logprobs
            if group.update(slot, Continuations(logprobs.top_values[at][:count], logprobs.top_ids[at][:count])):
                if group.search.finished:
                    finished.append(group)
                else:
                    _free_dropped_beams(slots, kv, group)
        return finished


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


def block_copies(
    slots: SlotTable, kv: BlockManager, forked: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Blocks to copy for forked (parent slot, slot) pairs, as (sources, targets), once the slots have their blocks.

    Only last blocks that are not full are copied; None if all are full.
    """
    pairs = [(parent, child) for parent, child in forked if slots.num_computed[parent] % kv.block_size]
    if not pairs:
        return None
    parents, children = np.array(pairs).T
    block_indices = slots.num_computed[parents] // kv.block_size
    return kv.table[:, parents, block_indices].ravel(), kv.table[:, children, block_indices].ravel()


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix of two sequences of equal length."""
    different = np.flatnonzero(one != other)
    return int(different[0]) if different.size else len(one)


def beam_response(state: RequestState) -> Response:
    """The final response of a finished beam search."""
    assert state.search is not None
    beams = state.search.best("cancelled" if state.reason == "cancelled" else None)
    if not beams:  # stopped before its first step
        return Response(state.request.id, Output(NO_TOKENS, state.reason), final=True)
    first = beams[0]
    num_cached_tokens = state.num_cached_tokens
    output = Output(first.token_ids, state.reason, first.logprobs, beams=beams, num_cached_tokens=num_cached_tokens)
    return Response(state.request.id, output, final=True)
