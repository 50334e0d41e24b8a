"""What holds of a batch at any moment between two steps: slots, lists and blocks agree. For tests, and on demand."""

from __future__ import annotations

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.scheduler.beams import BeamSearches
from torchweave.engine.scheduler.running_set import RunningSet
from torchweave.engine.scheduler.slot_table import SlotTable


def check_running(running: RunningSet) -> None:
    """Raise AssertionError where the books of slots, requests and blocks do not agree."""
    running.kv.check()
    slots, used = running.slots, [slot for slot, state in enumerate(running.slots.state) if state is not None]
    assert sorted([*slots.free, *used]) == list(range(len(slots.state))), "a slot was lost, or is in use and free"
    assert sorted(slots.of.values()) == sorted(slot for slot in used if slots.group[slot] in (-1, slot))
    for request_id, slot in slots.of.items():
        assert slots.state_of(slot).request.id == request_id
    lists = [*running.decoding.tolist(), *running.prefill, *running.pending_release]
    assert len(set(lists)) == len(lists) and set(lists) <= set(used), (
        "a slot is in two lists, or in one without a request"
    )
    assert not running.kv.held_blocks[slots.free].any(), "a free slot holds blocks"
    _check_beams(running.beams, slots)
    _check_sharing(running.kv, slots, used)


def _check_beams(beams: BeamSearches, slots: SlotTable) -> None:
    grouped = np.flatnonzero(slots.group >= 0).tolist()
    assert sorted(slot for group in beams.groups.values() for slot in group.slots) == grouped
    for group in beams.groups.values():
        assert len(set(group.members)) == len(group.members) and set(group.members) <= set(group.slots)
        assert (slots.group[group.slots] == group.leader).all()


def _check_sharing(kv: BlockManager, slots: SlotTable, used: list[int]) -> None:
    """Who holds a block together has the same salt and the same tokens up to its end, as far as the host knows them."""
    for group in range(kv.num_groups):
        holders: dict[int, tuple[int, int]] = {}
        for slot in used:
            for block_idx in range(int(kv.first[group, slot]), int(kv.held_blocks[slot])):
                other = holders.setdefault(int(kv.table[group, slot, block_idx]), (slot, block_idx))
                if other[0] == slot:
                    continue
                assert other[1] == block_idx, "a block stands at different places of two sequences"
                one, two = slots.state_of(slot).request, slots.state_of(other[0]).request
                assert one.cache_salt == two.cache_salt, "requests with different salts share a block"
                known = min(len(one.input_ids), len(two.input_ids), (block_idx + 1) * kv.block_size)
                assert np.array_equal(one.input_ids[:known], two.input_ids[:known]), "a block is of two sequences"
