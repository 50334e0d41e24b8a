"""What holds of the KV cache's books at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torchweave.engine.kv_cache.block_manager import BlockManager


def check_blocks(kv: BlockManager) -> None:
    """Raise AssertionError unless every block is empty, known and idle, or held by exactly those slots that count it."""
    holders = np.zeros((kv.num_groups, kv.num_blocks), np.int64)
    for group in range(kv.num_groups):
        parts = [
            kv.table[group, slot, kv.first[group, slot] : held_blocks]
            for slot, held_blocks in enumerate(kv.held_blocks)
        ]
        holders[group] = np.bincount(np.concatenate(parts), minlength=kv.num_blocks)
    assert ((holders > 0).sum(0) <= 1).all(), "a block is held in two groups"
    assert np.array_equal(holders.sum(0), kv._ref_counts), "a block is held by more or fewer slots than are counted"
    assert np.array_equal((holders > 0).sum(1), kv._num_held), "a group holds more or fewer blocks than are counted"
    assert (kv._ref_counts[(kv._prefix_index.version == 0) & ~kv._forked] <= 1).all(), (
        "a block that is known to nobody is held twice"
    )
    empty = kv._free[: kv._num_empty]
    every = np.sort(np.concatenate([np.flatnonzero(kv._ref_counts), empty, np.fromiter(kv._evictable, np.int64)]))
    assert np.array_equal(every, np.arange(kv.num_blocks)), "a block was lost, or is held and free"
    assert not kv._prefix_index.version[empty].any() and all(kv._prefix_index.version[block] for block in kv._evictable)
    assert len(kv._prefix_index) == np.count_nonzero(kv._prefix_index.version)
    for key, block in kv._prefix_index.items():
        assert kv._prefix_index.key(block) == key and kv._prefix_index.version[block], (
            "a block is known by what it does not hold"
        )
        assert not holders[:, block].any() or holders[key[0], block], "a block is known in another group than holds it"
    assert (kv.reserved >= kv.held_blocks - kv.first).all(), "a slot holds more than was reserved for it"
    assert (kv.num_shared <= kv.held_blocks).all() and (kv.first <= kv.held_blocks).all()
    if kv.host is not None:
        kv.host.check()
