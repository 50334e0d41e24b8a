"""What holds of the KV cache's books at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torchweave.engine.kv_cache.block_manager import KVCache


def check_blocks(kv: KVCache) -> None:
    """Raise AssertionError unless every block is empty, known and idle, or held by exactly those slots that count it."""
    holders = np.zeros((kv.num_groups, kv.num_blocks), np.int64)
    for group in range(kv.num_groups):
        parts = [kv.table[group, slot, kv.first[group, slot] : held] for slot, held in enumerate(kv.held)]
        holders[group] = np.bincount(np.concatenate(parts), minlength=kv.num_blocks)
    assert ((holders > 0).sum(0) <= 1).all(), "a block is held in two groups"
    assert np.array_equal(holders.sum(0), kv._holders), "a block is held by more or fewer slots than are counted"
    assert np.array_equal((holders > 0).sum(1), kv._num_held), "a group holds more or fewer blocks than are counted"
    assert (kv._holders[(kv._known.since == 0) & ~kv._forked] <= 1).all(), (
        "a block that is known to nobody is held twice"
    )
    empty = kv._free[: kv._num_empty]
    every = np.sort(np.concatenate([np.flatnonzero(kv._holders), empty, np.fromiter(kv._idle, np.int64)]))
    assert np.array_equal(every, np.arange(kv.num_blocks)), "a block was lost, or is held and free"
    assert not kv._known.since[empty].any() and all(kv._known.since[block] for block in kv._idle)
    assert len(kv._known) == np.count_nonzero(kv._known.since)
    for key, block in kv._known.items():
        assert kv._known.key(block) == key and kv._known.since[block], "a block is known by what it does not hold"
        assert not holders[:, block].any() or holders[key[0], block], "a block is known in another group than holds it"
    assert (kv.reserved >= kv.held - kv.first).all(), "a slot holds more than was reserved for it"
    assert (kv.shared <= kv.held).all() and (kv.first <= kv.held).all()
    if kv.host is not None:
        kv.host.check()
