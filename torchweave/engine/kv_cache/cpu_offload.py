"""Host memory behind the KV cache: what is lost on the device may be copied back later, instead of computed again.

Here are numbers only: a block of the device goes to a *place* on the host, by what it is known as. A `Mover` copies, in the order
in which it is told and beside the steps. What it does not do by itself is asked for here:

- a step that writes into a block runs when copies from and to that block have landed (`hold`);
- a sequence begins when what it begins with has landed (`ready`); others go on meanwhile.

A block that is known never changes, so it may be copied at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Key = tuple[int, bytes]  # group of layers, and hash


class Mover(Protocol):
    """Copies blocks between the device and the host, one copy after the other. A ticket is a copy's number."""

    num_places: int

    def store(self, blocks: np.ndarray, places: np.ndarray) -> int:
        """Begin to copy blocks of the device to places of the host, behind the steps launched so far."""
        ...

    def load(self, places: np.ndarray, blocks: np.ndarray) -> int:
        """Begin to copy places of the host to blocks of the device, behind the steps launched so far."""
        ...

    def landed(self, ticket: int) -> bool:
        """Whether a copy, and all before it, have been made."""
        ...

    def hold(self, ticket: int) -> None:
        """Let the steps launched from here on run when that copy has been made."""
        ...


class HostPool:
    """Owner of the places on the host.

    Args:
        mover: copies.
        max_slots: sequences that can hold blocks at once.

    Attributes:
        stored_total, loaded_total: blocks copied to the host, and back.
        held_total: how often steps had to wait for a copy.
    """

    def __init__(self, mover: Mover, max_slots: int) -> None:
        self.stored_total = self.loaded_total = self.held_total = 0
        self._mover = mover
        self._place_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(mover.num_places - 1, -1, -1))
        self._claimed: set[int] = set()  # places that are about to be read
        self._copies: dict[int, int] = {}  # block: ticket of the last copy from or to it
        self._loads: dict[int, int] = {}  # block: ticket of the copy to it
        self._waits = np.full(max_slots, -1, np.int64)  # ticket that a slot waits for

    @property
    def num_places(self) -> int:
        return self._mover.num_places

    @property
    def num_known(self) -> int:
        """Blocks that the host has."""
        return len(self._place_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._place_of

    def keep(self, keys: Sequence[Key], blocks: Sequence[int], lost: bool = True) -> None:
        """Let the host have these blocks of the device, as far as there is room.

        Args:
            lost: the blocks are about to be written; without, they stay what they are.
        """
        pairs = []
        for key, block in zip(keys, blocks, strict=True):
            if key in self._place_of:
                self._place_of.move_to_end(key)
            elif (place := self._room()) is not None:
                self._place_of[key] = place
                pairs.append((block, place))
        if pairs:
            copied, places = np.array(pairs, np.int64).T
            _note(self._copies, self._mover, self._mover.store(copied, places), copied)
            self.stored_total += len(pairs)
        if lost:
            self._hold(blocks)

    def _room(self) -> int | None:
        """A place for one block more: a free one, or the least recently used one that nobody is about to read."""
        if self._free:
            return self._free.pop()
        key = next((key for key, place in self._place_of.items() if place not in self._claimed), None)
        return None if key is None else self._place_of.pop(key)

    def _hold(self, blocks: Sequence[int]) -> None:
        """Steps from here on may write these blocks."""
        last = max((self._copies.pop(block, -1) for block in blocks), default=-1)
        if last >= 0 and not self._mover.landed(last):
            self._mover.hold(last)
            self.held_total += 1

    def claim(self, keys: Sequence[Key]) -> np.ndarray:
        """The places of blocks that are about to be read: until `restore`, nothing takes them."""
        places = [self._place_of[key] for key in keys]
        for key in keys:
            self._place_of.move_to_end(key)
        self._claimed.update(places)
        return np.array(places, np.int64)

    def restore(self, places: np.ndarray, blocks: np.ndarray) -> None:
        """Begin to copy claimed places into blocks of the device."""
        self._claimed.difference_update(places.tolist())
        ticket = self._mover.load(places, blocks.astype(np.int64))
        for copies in (self._copies, self._loads):
            _note(copies, self._mover, ticket, blocks)
        self.loaded_total += len(places)

    def attached(self, slot: int, blocks: np.ndarray) -> None:
        """A slot begins with these blocks."""
        self._waits[slot] = max((self._loads.get(block, -1) for block in blocks.tolist()), default=-1)

    def left(self, slot: int) -> None:
        """A slot waits for nothing any more."""
        self._waits[slot] = -1

    def ready(self, slot: int) -> bool:
        """Whether all that a slot began with has landed."""
        if self._waits[slot] >= 0 and self._mover.landed(int(self._waits[slot])):
            self._waits[slot] = -1
        return self._waits[slot] < 0

    @property
    def waiting(self) -> bool:
        """Whether some slot waits for a copy."""
        return any(not self.ready(slot) for slot in np.flatnonzero(self._waits >= 0))

    def clear(self) -> None:
        """Know nothing any more."""
        self._free += self._place_of.values()
        self._place_of.clear()
        self._waits[:] = -1

    def check(self) -> None:
        """Raise AssertionError unless every place is free or that of one block."""
        every = sorted([*self._free, *self._place_of.values()])
        assert every == list(range(self.num_places)), "a place on the host was lost, or is used twice"
        assert not self._claimed, "a place was claimed and not read"


def _note(copies: dict[int, int], mover: Mover, ticket: int, blocks: np.ndarray) -> None:
    """Enter a copy of these blocks; those that have landed are left out."""
    for block in [block for block, each in copies.items() if mover.landed(each)]:
        del copies[block]
    copies.update(dict.fromkeys(blocks.tolist(), ticket))
