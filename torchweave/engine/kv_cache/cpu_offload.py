"""Host memory behind the KV cache: evicted blocks are copied back instead of recomputed.

Only block numbers are kept here: a block of the device is stored in a *host block* under its key. A `BlockCopier` copies in order,
in parallel to the steps. The pool synchronizes both:

- a step that writes a block waits for copies from and to that block (`wait_for`);
- a sequence starts when its cached prefix is loaded (`ready`); other sequences continue meanwhile.

A block in the prefix cache never changes, so it may be copied at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from torchweave.engine.kv_cache.prefix_index import Key


class BlockCopier(Protocol):
    """Copies blocks between device and host, one copy after the other. A ticket is the number of a copy."""

    num_host_blocks: int

    def store(self, blocks: np.ndarray, host_blocks: np.ndarray) -> int:
        """Begin to copy blocks of the device to host blocks, after the steps launched so far; returns a ticket."""
        ...

    def load(self, host_blocks: np.ndarray, blocks: np.ndarray) -> int:
        """Begin to copy host blocks to blocks of the device, after the steps launched so far; returns a ticket."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Whether a copy and all before it are complete."""
        ...

    def wait_for(self, ticket: int) -> None:
        """Let steps launched from now on wait for that copy."""
        ...


class HostBlockPool:
    """Owner of the host blocks.

    Args:
        copier: copies blocks.
        max_slots: most sequences with blocks at a time.

    Attributes:
        stored_total, loaded_total: blocks copied to the host, and back.
        stalls_total: number of times that steps waited for a copy.
    """

    def __init__(self, copier: BlockCopier, max_slots: int) -> None:
        self.stored_total = self.loaded_total = self.stalls_total = 0
        self._copier = copier
        self._host_block_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(copier.num_host_blocks - 1, -1, -1))
        self._pinned: set[int] = set()  # host blocks that are about to be read
        self._copies: dict[int, int] = {}  # ticket of the last copy from or to a block
        self._loads: dict[int, int] = {}  # ticket of the copy to a block
        self._load_tickets = np.full(max_slots, -1, np.int64)  # ticket that a slot waits for; -1: none

    @property
    def num_host_blocks(self) -> int:
        return self._copier.num_host_blocks

    @property
    def num_cached(self) -> int:
        """Host blocks in use."""
        return len(self._host_block_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._host_block_of

    def offload(self, keys: Sequence[Key], blocks: Sequence[int], evicted: bool = True) -> None:
        """Copy blocks of the device to the host, as far as there is room.

        Args:
            evicted: the blocks are about to be overwritten, so steps wait for their copies.
        """
        pairs = []
        for key, block in zip(keys, blocks, strict=True):
            if key in self._host_block_of:
                self._host_block_of.move_to_end(key)
            elif (host_block := self._allocate()) is not None:
                self._host_block_of[key] = host_block
                pairs.append((block, host_block))
        if pairs:
            copied, host_blocks = np.array(pairs, np.int64).T
            _record_copy(self._copies, self._copier, self._copier.store(copied, host_blocks), copied)
            self.stored_total += len(pairs)
        if evicted:
            self._wait_for_copies(blocks)

    def _allocate(self) -> int | None:
        """A host block: a free one, or the least recently used one that is not pinned; None if all are pinned."""
        if self._free:
            return self._free.pop()
        key = next((key for key, host_block in self._host_block_of.items() if host_block not in self._pinned), None)
        return None if key is None else self._host_block_of.pop(key)

    def _wait_for_copies(self, blocks: Sequence[int]) -> None:
        """Let further steps, which may write these blocks, wait for copies from and to them."""
        last = max((self._copies.pop(block, -1) for block in blocks), default=-1)
        if last >= 0 and not self._copier.is_done(last):
            self._copier.wait_for(last)
            self.stalls_total += 1

    def pin(self, keys: Sequence[Key]) -> np.ndarray:
        """The host blocks of `keys`, protected from eviction until `restore`."""
        host_blocks = [self._host_block_of[key] for key in keys]
        for key in keys:
            self._host_block_of.move_to_end(key)
        self._pinned.update(host_blocks)
        return np.array(host_blocks, np.int64)

    def restore(self, host_blocks: np.ndarray, blocks: np.ndarray) -> None:
        """Begin to copy pinned host blocks into blocks of the device."""
        self._pinned.difference_update(host_blocks.tolist())
        ticket = self._copier.load(host_blocks, blocks.astype(np.int64))
        for copies in (self._copies, self._loads):
            _record_copy(copies, self._copier, ticket, blocks)
        self.loaded_total += len(host_blocks)

    def on_attach(self, slot: int, blocks: np.ndarray) -> None:
        """Let a slot wait until `blocks`, its cached prefix, are loaded."""
        self._load_tickets[slot] = max((self._loads.get(block, -1) for block in blocks.tolist()), default=-1)

    def released(self, slot: int) -> None:
        """Stop waiting for a slot's blocks."""
        self._load_tickets[slot] = -1

    def ready(self, slot: int) -> bool:
        """Whether a slot's cached prefix is loaded."""
        if self._load_tickets[slot] >= 0 and self._copier.is_done(int(self._load_tickets[slot])):
            self._load_tickets[slot] = -1
        return self._load_tickets[slot] < 0

    @property
    def is_loading(self) -> bool:
        """Whether a slot waits for a copy."""
        return any(not self.ready(slot) for slot in np.flatnonzero(self._load_tickets >= 0))

    def clear(self) -> None:
        """Free all host blocks."""
        self._free += self._host_block_of.values()
        self._host_block_of.clear()
        self._load_tickets[:] = -1

    def check(self) -> None:
        """Raise AssertionError unless every host block is free or has one key."""
        blocks = sorted([*self._free, *self._host_block_of.values()])
        assert blocks == list(range(self.num_host_blocks)), "a host block was lost, or is used twice"
        assert not self._pinned, "a host block is pinned and was not read"


def _record_copy(copies: dict[int, int], copier: BlockCopier, ticket: int, blocks: np.ndarray) -> None:
    """Enter a copy of these blocks, and drop completed copies."""
    for block in [block for block, each in copies.items() if copier.is_done(each)]:
        del copies[block]
    copies.update(dict.fromkeys(blocks.tolist(), ticket))
