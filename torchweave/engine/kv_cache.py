"""Blocks of the paged KV cache: which are free, and which sequence holds which.

The blocks themselves live on the device, one pair of tensors a layer; here are their numbers only. All work is on arrays,
so that granting blocks to hundreds of sequences costs no more than granting one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grant:
    """Blocks that were just given: entry i says that column `columns[i]` of slot `slots[i]`'s table is `blocks[i]`."""

    slots: np.ndarray
    columns: np.ndarray
    blocks: np.ndarray


class KVCache:
    """Owner of the block numbers.

    Args:
        num_blocks: blocks on the device.
        block_size: tokens in a block.
        max_slots: sequences that can hold blocks at once.
        max_blocks_per_slot: columns of the block table.
    """

    def __init__(self, num_blocks: int, block_size: int, max_slots: int, max_blocks_per_slot: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.table = np.full((max_slots, max_blocks_per_slot), -1, np.int32)
        self.held = np.zeros(max_slots, np.int64)  # blocks that a slot holds
        self.reserved = np.zeros(max_slots, np.int64)  # blocks that a slot may come to hold, those it holds included
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self.allocated_total = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    @property
    def num_unreserved(self) -> int:
        """Blocks that no running request may come to need."""
        return self.num_blocks - int(self.reserved.sum())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reserve(self, slot: int, num_blocks: int) -> None:
        """Promise a slot that it can come to hold `num_blocks`."""
        self.reserved[slot] = num_blocks

    def short(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Which of `slots` hold too few blocks for `num_tokens` tokens (a mask)."""
        return num_tokens > self.held[slots] * self.block_size

    def grant(self, slots: np.ndarray, num_tokens: np.ndarray) -> Grant:
        """Give each slot the blocks it lacks to hold `num_tokens` tokens. The caller has made sure that they fit."""
        need = -(-num_tokens // self.block_size) - self.held[slots]
        need = np.maximum(need, 0)
        total = int(need.sum())
        assert total <= self._num_free, "a policy let a step run that the KV cache cannot hold"
        blocks = self._free[self._num_free - total : self._num_free][::-1].copy()
        self._num_free -= total
        owners = np.repeat(slots, need)
        first = np.repeat(np.cumsum(need) - need, need)
        columns = np.arange(total) - first + np.repeat(self.held[slots], need)
        self.table[owners, columns] = blocks
        self.held[slots] += need
        self.allocated_total += total
        return Grant(owners, columns, blocks)

    def free(self, slot: int) -> None:
        """Take back all blocks of a slot, and its reservation."""
        held = int(self.held[slot])
        self._free[self._num_free : self._num_free + held] = self.table[slot, :held]
        self._num_free += held
        self.table[slot, :held] = -1
        self.held[slot] = 0
        self.reserved[slot] = 0

    def check(self) -> None:
        """Raise AssertionError unless every block is either free or held by exactly one slot."""
        held = np.concatenate([self.table[slot, :count] for slot, count in enumerate(self.held)])
        every = np.sort(np.concatenate([held, self._free[: self._num_free]]))
        assert np.array_equal(every, np.arange(self.num_blocks)), "a block was lost or is held twice"
        assert (self.reserved >= self.held).all(), "a slot holds more than was reserved for it"
