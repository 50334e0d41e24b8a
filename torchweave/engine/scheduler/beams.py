"""Beam searches that run: one request each, with a slot for each beam of its width.

All beams hold the blocks of what they have in common; a block is copied only when two beams go on within it. A step of a search
needs to know what the step before it found, so a search rests until that has been taken in, and takes part in every second step
of an engine that runs ahead by one; nobody else waits for it.

A search that starts, or was paused and resumes, reads its beams one after another; each begins with the full blocks that it has in
common with those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.request import Output
from torchweave.engine.responses import NO_TOKENS, Response
from torchweave.engine.sampling.beam_search import BeamSearch, Continuations
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.slot_table import SlotTable
from torchweave.engine.scheduler.step import StepLogprobs
from torchweave.ops.slot_state import SlotUpdates


@dataclass
class BeamGroup:
    """One search that runs.

    Attributes:
        state: its request.
        search: what it has found.
        slots: as many as the search is wide; the first is the one that the request is known by.
        members: the slot of each beam.
        prefill_beam: number of the beam that is being read; None once all were.
        forks: of the next step, when its beams are known: for each beam the slot that it continues, and whether it stays there.
            None while a step is awaited or beams are read.
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
        """Rows of the step that it can take part in now."""
        return len(self.forks) if self.forks is not None else 0

    def sequence(self, beam: int) -> np.ndarray:
        return np.concatenate([self.state.prompt, self.search.beams[beam].tokens])

    def update(self, slot: int, continuations: Continuations) -> bool:
        """Take in what the model says of the beam in `slot`; True when that was the last one, and the search has gone on."""
        self._continuations[self.members.index(slot)] = continuations
        if len(self._continuations) < len(self.search.beams):
            return False
        parents = self.search.advance([self._continuations[beam] for beam in range(len(self._continuations))])
        self._continuations.clear()
        kept: set[int] = set()
        self.forks = []
        for slot in (self.members[parent] for parent in parents):
            self.forks.append((slot, slot not in kept))
            kept.add(slot)
        return True


class BeamSearches:
    """All searches that run.

    Args:
        slots, kv: the slots and blocks that they share with everyone else.
        updates: collects what the device has to be told before the next step.

    Attributes:
        groups: by the slot that the request is known by.
    """

    def __init__(self, slots: SlotTable, kv: BlockManager, updates: SlotUpdates) -> None:
        self.groups: dict[int, BeamGroup] = {}
        self._slots = slots
        self._kv = kv
        self._updates = updates

    def __bool__(self) -> bool:
        return bool(self.groups)

    def of(self, slot: int) -> BeamGroup | None:
        """The search that a slot belongs to."""
        return self.groups.get(int(self._slots.group[slot]))

    def decoding(self) -> list[BeamGroup]:
        """Searches that have read all of their beams."""
        return [group for group in self.groups.values() if group.prefill_beam is None and not group.pending_release]

    # -- before a step -------------------------------------------------------------------------------------------------

    def start(self, leader: int, state: RequestState) -> BeamGroup:
        """A request that has just been given the slot `leader` takes as many more as its search is wide."""
        assert state.search is not None
        limit, common = int(self._slots.limit[leader]), len(state.prompt) // self._kv.block_size
        slots = [leader]
        for _ in range(state.request.sampling.beam_width - 1):
            slots.append(self._slots.add_beam(leader, limit))
            self._kv.reserve_fork(slots[-1], limit, common)
        self._slots.group[leader] = leader
        group = self.groups[leader] = BeamGroup(state, state.search, slots, slots[: len(state.search.beams)])
        return group

    def prefill_next_beam(self, slot: int) -> int | None:
        """A beam has been read in `slot`: begin with the next; returns the slot that it is read in, None when that was the last."""
        group = self.of(slot)
        assert group is not None and group.prefill_beam is not None
        beam = group.prefill_beam + 1
        if beam == len(group.search.beams):
            group.prefill_beam = None
            return None
        group.prefill_beam = beam
        sequence, child = group.sequence(beam), group.members[beam]
        common, parent = max((_common(group.sequence(other), sequence), group.members[other]) for other in range(beam))
        blocks = min(common, len(sequence) - 1) // self._kv.block_size
        if not self._kv.covers_window(parent, blocks):
            blocks = 0  # its window has moved on
        self._fork(parent, child, blocks)
        self._slots.start_prefill(child, sequence, blocks * self._kv.block_size)
        return child

    def blocks_needed(self, group: BeamGroup) -> int:
        """Columns that the search needs for its next step. What it does not look at any more is given back before."""
        if group.forks is None:
            return 0
        assert group.forks, "a search that goes on has beams"
        kept = np.array([slot for slot, stays in group.forks if stays])
        forked = len(group.forks) - len(kept)  # each into a block of its own
        self._kv.free_out_of_window(kept, self._slots.num_computed[kept])
        return int(self._kv.blocks_needed(kept, self._slots.num_computed[kept] + 1).sum()) + forked

    def held_blocks(self, group: BeamGroup) -> int:
        """Blocks that come free if the search is paused."""
        return self._kv.num_freeable(group.slots)

    def assign_slots(self, groups: Sequence[BeamGroup]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Give each beam of the next step a slot with the blocks of the beam that it continues.

        Returns:
            int32, the slots; and (slot continued, slot) wherever the last block, not yet full, has to be copied.
        """
        rows: list[int] = []
        copies: list[tuple[int, int]] = []
        for group in groups:
            assert group.forks is not None
            tokens = int(self._slots.num_computed[group.forks[0][0]])
            kept = {slot for slot, stays in group.forks if stays}
            spare = [slot for slot in group.slots if slot not in kept]
            group.members = [slot if stays else self._fork_beam(slot, spare.pop()) for slot, stays in group.forks]
            if tokens % self._kv.block_size:
                copies += [
                    (fork[0], slot) for fork, slot in zip(group.forks, group.members, strict=True) if not fork[1]
                ]
            last = np.array([beam.tokens[-1] for beam in group.search.beams])
            self._updates.set("last_token", group.members, last)
            self._updates.set("position", group.members, tokens)
            group.forks = None
            rows += group.members
        return np.array(rows, np.int32), copies

    def _fork_beam(self, parent: int, child: int) -> int:
        """Let `child` begin with the full blocks of `parent`."""
        tokens = int(self._slots.num_computed[parent])
        self._fork(parent, child, tokens // self._kv.block_size)
        self._slots.num_computed[child] = tokens
        return child

    def _fork(self, parent: int, child: int, blocks: int) -> None:
        grant = self._kv.fork(parent, child, blocks)
        self._updates.set_block_table(grant.slots, grant.block_indices, grant.blocks)
        self._kv.reserve(child, int(self._slots.limit[child]))

    def block_copies(self, copies: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray] | None:
        """The blocks to copy, (from, to), once the slots have theirs."""
        if not copies:
            return None
        parents, children = np.array(copies).T
        block_indices = self._slots.num_computed[parents] // self._kv.block_size
        return self._kv.table[:, parents, block_indices].ravel(), self._kv.table[:, children, block_indices].ravel()

    def mark_scheduled(self, slots: np.ndarray, index: int) -> None:
        """A step names `slots`: nothing of their searches is given back before it has completed."""
        for leader in set(self._slots.group[slots].tolist()) - {-1}:
            self._slots.last_step_index[self.groups[leader].slots] = index

    # -- after a step --------------------------------------------------------------------------------------------------

    def update(self, slots: np.ndarray, rows: np.ndarray, found: StepLogprobs) -> list[BeamGroup]:
        """Take in the rows of a step that belong to searches; returns those searches that have come to their end."""
        entry_of_row = {int(row): i for i, row in enumerate(found.rows)}
        ended = []
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            group, at = self.of(slot), entry_of_row[row]
            assert group is not None
            keep = group.state.num_logprobs
            if group.update(slot, Continuations(found.top_values[at][:keep], found.top_ids[at][:keep])):
                if group.search.finished:
                    ended.append(group)
                else:
                    self._free_dropped_beams(group)
        return ended

    def _free_dropped_beams(self, group: BeamGroup) -> None:
        """Give back the blocks of the slots whose beams do not go on; what such a slot may come to need stays reserved."""
        assert group.forks is not None
        kept = {slot for slot, _ in group.forks}
        common = int(self._slots.num_computed[group.forks[0][0]]) // self._kv.block_size
        for slot in set(group.slots) - kept:
            self._kv.free(slot)
            self._kv.reserve_fork(slot, int(self._slots.limit[slot]), common)

    def release(self, group: BeamGroup) -> None:
        """Give back the slots and blocks of a search."""
        del self.groups[group.leader]
        for slot in group.slots:
            self._slots.release(slot)
            self._kv.free(slot)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two sequences of the same length begin with in common."""
    different = np.flatnonzero(one != other)
    return int(different[0]) if different.size else len(one)


def found(state: RequestState) -> Response:
    """The answers of a beam search that is over."""
    assert state.search is not None
    beams = state.search.best("cancelled" if state.reason == "cancelled" else None)
    if not beams:  # stopped before its first step
        return Response(state.request.id, Output(NO_TOKENS, state.reason), final=True)
    return Response(
        state.request.id, Output(beams[0].token_ids, state.reason, beams[0].logprobs, beams=beams), final=True
    )
