"""Host memory behind the KV cache: what is lost on the device may be copied back later, instead of computed again.

Here are numbers only: a block of the device goes to a *place* on the host, by what it is known as. A `BlockCopier`
copies, in the order
in which it is told and beside the steps. What it does not do by itself is asked for here:

- a step that writes into a block runs when copies from and to that block have landed (`wait_for`);
- a sequence begins when what it begins with has landed (`ready`); others go on meanwhile.

A block that is known never changes, so it may be copied at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Key = tuple[int, bytes]  # group of layers, and hash


class BlockCopier(Protocol):
    """Copies blocks between the device and the host, one copy after the other. A ticket is a copy's number."""

    num_host_blocks: int

    def store(self, blocks: np.ndarray, host_blocks: np.ndarray) -> int:
        """Begin to copy blocks of the device to places of the host, behind the steps launched so far."""
        ...

    def load(self, host_blocks: np.ndarray, blocks: np.ndarray) -> int:
        """Begin to copy places of the host to blocks of the device, behind the steps launched so far."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Whether a copy, and all before it, have been made."""
        ...

    def wait_for(self, ticket: int) -> None:
        """Let the steps launched from here on run when that copy has been made."""
        ...


class HostBlockPool:
    """Owner of the places on the host.

    Args:
        copier: copies.
        max_slots: sequences that can hold blocks at once.

    Attributes:
        stored_total, loaded_total: blocks copied to the host, and back.
        stalls_total: how often steps had to wait for a copy.
    """

    def __init__(self, copier: BlockCopier, max_slots: int) -> None:
        self.stored_total = self.loaded_total = self.stalls_total = 0
        self._mover = copier
        self._host_block_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(copier.num_host_blocks - 1, -1, -1))
        self._pinned: set[int] = set()  # places that are about to be read
        self._copies: dict[int, int] = {}  # block: ticket of the last copy from or to it
        self._loads: dict[int, int] = {}  # block: ticket of the copy to it
        self._load_tickets = np.full(max_slots, -1, np.int64)  # ticket that a slot waits for

    @property
    def num_host_blocks(self) -> int:
        return self._mover.num_host_blocks

    @property
    def num_cached(self) -> int:
        """Blocks that the host has."""
        return len(self._host_block_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._host_block_of

    def offload(self, keys: Sequence[Key], blocks: Sequence[int], lost: bool = True) -> None:
        """Let the host have these blocks of the device, as far as there is room.

        Args:
            lost: the blocks are about to be written; without, they stay what they are.
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
            _record_copy(self._copies, self._mover, self._mover.store(copied, host_blocks), copied)
            self.stored_total += len(pairs)
        if lost:
            self._wait_for_copies(blocks)

    def _allocate(self) -> int | None:
        """A place for one block more: a free one, or the least recently used one that nobody is about to read."""
        if self._free:
            return self._free.pop()
        key = next((key for key, host_block in self._host_block_of.items() if host_block not in self._pinned), None)
        return None if key is None else self._host_block_of.pop(key)

    def _wait_for_copies(self, blocks: Sequence[int]) -> None:
        """Steps from here on may write these blocks."""
        last = max((self._copies.pop(block, -1) for block in blocks), default=-1)
        if last >= 0 and not self._mover.is_done(last):
            self._mover.wait_for(last)
            self.stalls_total += 1

    def pin(self, keys: Sequence[Key]) -> np.ndarray:
        """The places of blocks that are about to be read: until `restore`, nothing takes them."""
        host_blocks = [self._host_block_of[key] for key in keys]
        for key in keys:
            self._host_block_of.move_to_end(key)
        self._pinned.update(host_blocks)
        return np.array(host_blocks, np.int64)

    def restore(self, host_blocks: np.ndarray, blocks: np.ndarray) -> None:
        """Begin to copy claimed places into blocks of the device."""
        self._pinned.difference_update(host_blocks.tolist())
        ticket = self._mover.load(host_blocks, blocks.astype(np.int64))
        for copies in (self._copies, self._loads):
            _record_copy(copies, self._mover, ticket, blocks)
        self.loaded_total += len(host_blocks)

    def on_attach(self, slot: int, blocks: np.ndarray) -> None:
        """A slot begins with these blocks."""
        self._load_tickets[slot] = max((self._loads.get(block, -1) for block in blocks.tolist()), default=-1)

    def released(self, slot: int) -> None:
        """A slot waits for nothing any more."""
        self._load_tickets[slot] = -1

    def ready(self, slot: int) -> bool:
        """Whether all that a slot began with has landed."""
        if self._load_tickets[slot] >= 0 and self._mover.is_done(int(self._load_tickets[slot])):
            self._load_tickets[slot] = -1
        return self._load_tickets[slot] < 0

    @property
    def is_loading(self) -> bool:
        """Whether some slot waits for a copy."""
        return any(not self.ready(slot) for slot in np.flatnonzero(self._load_tickets >= 0))

    def clear(self) -> None:
        """Know nothing any more."""
        self._free += self._host_block_of.values()
        self._host_block_of.clear()
        self._load_tickets[:] = -1

    def check(self) -> None:
        """Raise AssertionError unless every place is free or that of one block."""
        every = sorted([*self._free, *self._host_block_of.values()])
        assert every == list(range(self.num_host_blocks)), "a place on the host was lost, or is used twice"
        assert not self._pinned, "a place was claimed and not read"


def _record_copy(copies: dict[int, int], copier: BlockCopier, ticket: int, blocks: np.ndarray) -> None:
    """Enter a copy of these blocks; those that have landed are left out."""
    for block in [block for block, each in copies.items() if copier.is_done(each)]:
        del copies[block]
    copies.update(dict.fromkeys(blocks.tolist(), ticket))
