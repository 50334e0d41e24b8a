"""The running requests: slots that prefill, slots that decode, and slots whose release is pending."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.scheduler.request_state import SlotTable
from torchweave.ops.slot_state import SlotUpdates

NO_SLOTS = np.empty(0, np.int32)


class SlotGroup(Protocol):
    """A running request with several slots: a beam search.

    Attributes:
        slots: all its slots; the first one stands for the request.
        members: the slots of its sequences.
        pending_release: the request is finished or paused.
    """

    slots: list[int]
    members: list[int]
    pending_release: bool

    @property
    def leader(self) -> int:
        """The first slot."""
        ...

    @property
    def in_prefill(self) -> bool:
        """Whether a sequence is still to be prefilled."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of the next step; 0 while a result is pending."""
        ...

    @property
    def continued_slots(self) -> list[int]:
        """Slots that their sequence keeps in the next step."""
        ...

    def blocks_needed(self, slots: SlotTable, kv: BlockManager) -> int:
        """Logical blocks that the next step needs."""
        ...

    def next_prefill_slot(self, slots: SlotTable, kv: BlockManager, updates: SlotUpdates) -> int | None:
        """Begin the prefill of the next sequence; returns its slot, or None after the last one."""
        ...


class RunningSet:
    """Owner of the running requests' state on the host.

    Args:
        max_slots: number of slots.
        reuse: requests with a common prefix share KV cache blocks.

    Attributes:
        slots: arrays over slots.
        groups: requests with several slots, by the first. Of their slots, `prefill` holds the one in prefill, and
            `pending_release` the first one; `decoding` holds none.
        prefill: slots in prefill, oldest first.
        decoding: slots that take one token per step.
        pending_release: slots that are finished or paused, and that a step in flight may still contain.
        completed: index of the last completed step.
        steps_before_alloc: number of decode-only steps before any request needs a block.
    """

    def __init__(self, max_slots: int, reuse: bool) -> None:
        self.slots = SlotTable(max_slots)
        self.groups: dict[int, SlotGroup] = {}
        self.steps_before_alloc = 0
        self.reuse = reuse
        self.prefill: list[int] = []
        self.decoding = NO_SLOTS
        self.pending_release: list[int] = []
        self.completed = -1

    def in_flight(self, slot: int) -> bool:
        return self.slots.last_step_index[slot] > self.completed

    def group_of(self, slot: int) -> SlotGroup | None:
        """The group that a slot belongs to."""
        return self.groups.get(int(self.slots.group[slot]))

    def leader_of(self, slot: int) -> int:
        """The first slot of the request that a slot belongs to."""
        group = self.group_of(slot)
        return slot if group is None else group.leader

    def slots_of(self, slot: int) -> Sequence[int]:
        """The slots of the request whose first one is `slot`."""
        return self.groups[slot].slots if slot in self.groups else (slot,)

    @property
    def decoding_groups(self) -> list[SlotGroup]:
        """Groups of which all sequences are computed."""
        return [group for group in self.groups.values() if not (group.in_prefill or group.pending_release)]

    @property
    def decision_slots(self) -> list[int]:
        """Slots in the order of a `Decision`: decode requests, groups that decode, and prompts."""
        return [*self.decoding.tolist(), *(group.leader for group in self.decoding_groups), *self.prefill]

    def all_but(self, indices: Collection[int]) -> tuple[np.ndarray, list[SlotGroup]]:
        """The decode slots and groups without those of some indices of `decision_slots`."""
        groups, first = self.decoding_groups, len(self.decoding)
        runs = np.ones(first + len(groups) + len(self.prefill), bool)
        runs[list(indices)] = False
        return self.decoding[runs[:first]], [group for i, group in enumerate(groups, start=first) if runs[i]]

    def micro_batch(
        self, decoding: np.ndarray, step_index: int, num_micro_batches: int, alone: bool = False
    ) -> np.ndarray:
        """Which of the slots `decoding` step `step_index` runs, so that each is in one of `num_micro_batches` steps; bool.

        Such steps read no token of one another. A step has an equal part of the slots: those that have waited longest, or none if
        all were in the last steps.

        Args:
            alone: the step has only these rows; it runs the slots that have waited longest in any case.
        """
        last_step_index = self.slots.last_step_index[decoding]
        newest = step_index - num_micro_batches
        chosen = last_step_index <= (max(newest, last_step_index.min(initial=step_index)) if alone else newest)
        most = -(-len(decoding) // num_micro_batches)
        if np.count_nonzero(chosen) > most:
            order = np.argsort(last_step_index, kind="stable")
            chosen[order[most:]] = False
        return chosen

    def stop(self, slot: int) -> None:
        """Schedule a request in no further step. Its slots are released when the steps in flight have completed."""
        if (group := self.group_of(slot)) is not None:
            group.pending_release = True
            self.prefill = [each for each in self.prefill if each not in group.members]
            slot = group.leader
        if slot not in self.pending_release:
            self.pending_release.append(slot)
        if slot in self.prefill:
            self.prefill.remove(slot)
        self.decoding = self.decoding[self.decoding != slot]

    def advance(
        self,
        kv: BlockManager,
        updates: SlotUpdates,
        decoded: np.ndarray,
        slots: np.ndarray,
        below_limit: np.ndarray,
        emits: np.ndarray,
    ) -> None:
        """Move the slots of a new step on: from prefill to decode, from one sequence of a group to the next, or out at their limit.

        Args:
            decoded: slots of `decoding` in the step; the others stay.
            slots: rows of the step.
            below_limit: rows that may take another token.
            emits: rows that generate a token.
        """
        skipped = NO_SLOTS
        if len(decoded) < len(self.decoding):
            skipped = self.decoding[~np.isin(self.decoding, decoded)]
        if self.prefill:
            following = (self._next_prefill_slot(kv, updates, slot) for slot in self.prefill)
            self.prefill = [slot for slot in following if slot is not None]
        if len(slots) > len(decoded) or skipped.size or not below_limit.all():
            decoding = slots[emits & below_limit]
            if self.groups:
                decoding = decoding[self.slots.group[decoding] < 0]
            self.decoding = np.concatenate([decoding, skipped])

    def take_back(self, slots: np.ndarray, sizes: np.ndarray) -> bool:
        """Reduce the computed tokens of a completed step's slots by drafts that were not kept.

        A slot that seemed to reach its limit decodes again. Returns whether there is one.
        """
        table = self.slots
        table.num_computed[slots] -= sizes
        below_limit = table.drafting[slots] & ~table.done[slots] & (table.num_computed[slots] < table.limit[slots])
        again = slots[below_limit & ~np.isin(slots, self.decoding)]
        again = again[~np.isin(again, self.pending_release)]
        self.decoding = np.concatenate([self.decoding, again])
        return bool(again.size)

    def _next_prefill_slot(self, kv: BlockManager, updates: SlotUpdates, slot: int) -> int | None:
        """The slot in which the prefill of `slot` continues: itself, that of its group's next sequence, or None at the end."""
        if self.slots.remaining_prefill(slot) > 0:
            return slot
        group = self.group_of(slot)
        return None if group is None else group.next_prefill_slot(self.slots, kv, updates)

    def free_out_of_window(self, kv: BlockManager) -> None:
        """Free the blocks that have left the attention window of a request."""
        if kv.has_windows:
            slots = [*self.decoding.tolist(), *self.prefill]
            slots += [slot for group in self.decoding_groups for slot in group.continued_slots]
            slots = np.array(slots, np.int64)
            kv.free_out_of_window(slots, self.slots.num_known(slots))

    def cache_full_blocks(self, kv: BlockManager, slot: int, num_tokens: int) -> Sequence[bytes]:
        """Enter the full blocks among the first `num_tokens` tokens of a slot, all computed, into the prefix cache.

        Returns:
            The hashes of these blocks; empty without prefix reuse.
        """
        if not self.reuse:
            return ()
        if self.slots.group[slot] >= 0:  # sequences of a group change from step to step
            num_tokens = min(num_tokens, len(self.slots.state_of(slot).prompt))
        tokens = self.slots.sequence(slot, num_tokens)
        hashes = self.slots.state_of(slot).hashes(tokens, kv.block_size)
        kv.cache_full_blocks(slot, hashes, first=int(kv.num_shared[slot]))
        return hashes

    def cache_answer(self, kv: BlockManager, slot: int) -> None:
        """Enter what a slot leaves into the prefix cache. Its last token was sampled but not fed: it is in no block."""
        table = self.slots
        num_tokens = int(table.prompt_len[slot] + max(table.num_generated[slot] - 1, 0))
        self.cache_full_blocks(kv, slot, min(int(table.num_computed[slot]), num_tokens))

    def release(self, kv: BlockManager, slot: int) -> None:
        """Free the slot or slots of a request, and their blocks."""
        slots = self.slots_of(slot)
        self.groups.pop(slot, None)
        for each in slots:
            self.slots.release(each)
            kv.free(each)

    def clear(self, kv: BlockManager) -> None:
        """Free every slot, even those in steps in flight."""
        for slot in list(self.slots.slot_of.values()):
            self.release(kv, slot)
        self.prefill.clear()
        self.pending_release.clear()
        self.decoding = NO_SLOTS
        self.steps_before_alloc = 0

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self, kv: BlockManager) -> None:
        """Raise AssertionError unless slots, requests and blocks agree, as they do between two steps."""
        kv.check()
        slots, used = self.slots, [slot for slot, state in enumerate(self.slots.state) if state is not None]
        assert sorted([*slots.free, *used]) == list(range(len(slots.state))), "a slot was lost, or is in use and free"
        assert sorted(slots.slot_of.values()) == sorted(slot for slot in used if slots.group[slot] in (-1, slot))
        for request_id, slot in slots.slot_of.items():
            assert slots.state_of(slot).request.id == request_id
        lists = [*self.decoding.tolist(), *self.prefill, *self.pending_release]
        assert len(set(lists)) == len(lists) and set(lists) <= set(used), "a slot is in two lists, or has no request"
        assert not kv.held_blocks[slots.free].any(), "a free slot holds blocks"
        grouped = np.flatnonzero(slots.group >= 0).tolist()
        assert sorted(slot for group in self.groups.values() for slot in group.slots) == grouped
        for group in self.groups.values():
            assert len(set(group.members)) == len(group.members) and set(group.members) <= set(group.slots)
            assert (slots.group[group.slots] == group.leader).all()
        self._check_sharing(kv, used)

    def _check_sharing(self, kv: BlockManager, used: list[int]) -> None:
        """Slots that share a block have equal salts and equal prompt tokens up to the end of the block."""
        for group in range(kv.num_groups):
            first_use: dict[int, tuple[int, int]] = {}
            for slot in used:
                for block_idx in range(int(kv.first[group, slot]), int(kv.held_blocks[slot])):
                    other = first_use.setdefault(int(kv.table[group, slot, block_idx]), (slot, block_idx))
                    if other[0] == slot:
                        continue
                    assert other[1] == block_idx, "a block has different positions in two sequences"
                    one, two = self.slots.state_of(slot).request, self.slots.state_of(other[0]).request
                    assert one.cache_salt == two.cache_salt, "requests with different salts share a block"
                    length = min(len(one.input_ids), len(two.input_ids), (block_idx + 1) * kv.block_size)
                    assert np.array_equal(one.input_ids[:length], two.input_ids[:length]), "a block has two contents"
