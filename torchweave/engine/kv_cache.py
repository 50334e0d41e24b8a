"""Blocks of the paged KV cache: which are free, which sequences hold which, and which can be used again.

The blocks themselves live on the device, one pair of tensors a layer; here are their numbers only. All work is on arrays,
so that granting blocks to hundreds of sequences costs no more than granting one.

A full block is known by the hash of its tokens and of all tokens before it. Sequences that begin alike hold the same blocks,
each counted; a block that nobody holds any more keeps its content until its memory is needed, the least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grant:
    """Blocks that were just given: entry i says that column `columns[i]` of slot `slots[i]`'s table is `blocks[i]`."""

    slots: np.ndarray
    columns: np.ndarray
    blocks: np.ndarray


def chain(tokens: np.ndarray, block_size: int, salt: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
    """One hash a full block of `tokens`, each over the block's tokens and the hash before it.

    Args:
        tokens: int32, from the sequence's first token on.
        salt: sequences with different salts share nothing.
        known: hashes of the first blocks, which are not computed again.
    """
    hashes = list(known)
    last = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    flat = np.ascontiguousarray(tokens, np.int32)
    for start in range(len(hashes) * block_size, len(flat) - block_size + 1, block_size):
        last = hashlib.blake2b(last + flat[start : start + block_size].tobytes(), digest_size=16).digest()
        hashes.append(last)
    return hashes


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
        self.shared = np.zeros(max_slots, np.int64)  # of these, the first so many were another's before
        self.reserved = np.zeros(max_slots, np.int64)  # blocks that a slot may come to hold, those it holds included
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = num_blocks
        self._holders = np.zeros(num_blocks, np.int32)  # slots that hold a block
        self._hashed = np.zeros(num_blocks, bool)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # hashed, held by nobody, least recently used first
        self.allocated_total = 0
        self.reused_total = 0
        self.missed_total = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be granted: empty ones, and those whose content nobody holds."""
        return self._num_empty + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_unreserved(self) -> int:
        """Free blocks that no running request may come to need; negative where less was promised than may be asked for."""
        return self.num_free - int((self.reserved - self.held).sum())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reserve(self, slot: int, num_blocks: int) -> None:
        """Note that a slot may come to hold `num_blocks`."""
        self.reserved[slot] = num_blocks

    # -- granting ------------------------------------------------------------------------------------------------------

    def lacking(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Blocks that each of `slots` lacks to hold `num_tokens` tokens."""
        return np.maximum(-(-num_tokens // self.block_size) - self.held[slots], 0)

    def grant(self, slots: np.ndarray, num_tokens: np.ndarray) -> Grant:
        """Give each slot the blocks it lacks to hold `num_tokens` tokens. The caller has made sure that they fit."""
        need = self.lacking(slots, num_tokens)
        total = int(need.sum())
        assert total <= self.num_free, "a policy let a step run that the KV cache cannot hold"
        self._empty(total - self._num_empty)
        blocks = self._free[self._num_empty - total : self._num_empty][::-1].copy()
        self._num_empty -= total
        self._holders[blocks] = 1
        owners = np.repeat(slots, need)
        first = np.repeat(np.cumsum(need) - need, need)
        columns = np.arange(total) - first + np.repeat(self.held[slots], need)
        self.table[owners, columns] = blocks
        self.held[slots] += need
        self.reserved[slots] = np.maximum(self.reserved[slots], self.held[slots])
        self.allocated_total += total
        return Grant(owners, columns, blocks)

    def _empty(self, count: int) -> None:
        """Forget the content of the `count` least recently used blocks that nobody holds."""
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._free[self._num_empty] = block
            self._num_empty += 1

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
        self._hashed[block] = False

    def free(self, slot: int) -> None:
        """Take back a slot's blocks and its reservation. What is known by a hash keeps its content as long as it can."""
        blocks = self.table[slot, : int(self.held[slot])]
        self._holders[blocks] -= 1
        left = blocks[self._holders[blocks] == 0]
        hashed = self._hashed[left]
        for block in left[hashed][::-1].tolist():  # the end of a sequence is of less use to others than its beginning
            self._idle[block] = None
        empty = left[~hashed]
        self._free[self._num_empty : self._num_empty + empty.size] = empty
        self._num_empty += empty.size
        blocks[:] = -1
        self.held[slot] = self.shared[slot] = self.reserved[slot] = 0

    # -- using blocks again --------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> tuple[list[int], int]:
        """The blocks that hold the longest known beginning of a sequence, and how many of them nobody holds."""
        blocks: list[int] = []
        for each in hashes:
            block = self._block_of.get(each)
            if block is None:
                break
            blocks.append(block)
        return blocks, sum(block in self._idle for block in blocks)

    def attach(self, slot: int, blocks: Sequence[int]) -> Grant:
        """Let an empty slot begin with blocks that `match` found."""
        assert not self.held[slot], "a slot shares blocks only at its beginning"
        for block in blocks:
            self._idle.pop(block, None)
        numbers = np.array(blocks, np.int32)
        columns = np.arange(len(blocks))
        self._holders[numbers] += 1
        self.table[slot, columns] = numbers
        self.held[slot] = self.shared[slot] = len(blocks)
        self.reused_total += len(blocks)
        return Grant(np.full(len(blocks), slot, np.int64), columns, numbers)

    def publish(self, slot: int, hashes: Sequence[bytes], first: int = 0) -> None:
        """Make a slot's blocks `first`, `first + 1`, ... known by `hashes[first:]`: all their tokens have been read.

        Where two sequences read the same tokens at once, one block is known and the other stays its owner's own.
        """
        for column in range(first, len(hashes)):
            block = int(self.table[slot, column])
            if hashes[column] not in self._block_of and not self._hashed[block]:
                self._block_of[hashes[column]] = block
                self._hash_of[block] = hashes[column]
                self._hashed[block] = True

    def forget_all(self) -> None:
        """Make nothing known any more: the blocks that nobody holds become empty."""
        self._empty(len(self._idle))
        for block in list(self._hash_of):
            self._forget(block)

    @property
    def num_known(self) -> int:
        """Blocks that a new sequence could begin with."""
        return len(self._block_of)

    # -- checking ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless every block is empty, known and idle, or held by exactly those slots that count it."""
        held = np.concatenate([self.table[slot, :count] for slot, count in enumerate(self.held)])
        holders = np.bincount(held, minlength=self.num_blocks)
        assert np.array_equal(holders, self._holders), "a block is held by more or fewer slots than are counted"
        assert (holders[~self._hashed] <= 1).all(), "a block that is known to nobody is held twice"
        empty = self._free[: self._num_empty]
        every = np.sort(np.concatenate([np.flatnonzero(holders), empty, np.fromiter(self._idle, np.int64)]))
        assert np.array_equal(every, np.arange(self.num_blocks)), "a block was lost, or is held and free"
        assert not self._hashed[empty].any() and all(self._hashed[block] for block in self._idle)
        assert {block: each for each, block in self._block_of.items()} == self._hash_of
        assert (self.reserved >= self.held).all(), "a slot holds more than was reserved for it"
        assert (self.shared <= self.held).all()
