"""Snapshots of recurrent states at block borders, so that models with recurrent layers share prefixes too.

A *snapshot* is a row of the state tensors behind the rows of the request slots. Only row numbers are kept here; the copies are
part of the steps (before the model from snapshots, after it to them), so that device order alone makes them
right: a row that a step overwrites was read by the steps before it.

A snapshot is known by the hash of the tokens before its position, as a block of the KV cache is. It is taken where a chunk of a
prompt ends: at the end of the last full block that a later request may share, where the blocks of another request with the same
beginning end, and every `_INTERVAL` blocks of a prompt that takes several steps. The least recently used one is evicted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit

_INTERVAL = 16  # blocks between two snapshots of a long prompt
Copies = tuple[np.ndarray, np.ndarray]
"""Rows of the state tensors to copy: sources and targets, int64 [n] each."""


class StateSnapshots:
    """Owner of the snapshots and of the pending copies.

    Args:
        first_row: row of the first snapshot; the rows before it belong to request slots.
        count: number of snapshots.
        block_size: tokens per block.

    Attributes:
        saved_total, restored_total: snapshots taken, and requests that started from one, so far.
    """

    def __init__(self, first_row: int, count: int, block_size: int) -> None:
        self.count = count
        self.saved_total = self.restored_total = 0
        self._block_size = block_size
        self._rows = range(first_row, first_row + count)
        self._free = list(reversed(self._rows))
        # Row and blocks, least recently used first.
        self._snapshots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._num_by_length: Counter[int] = Counter()  # snapshots by their number of blocks
        self._borders: dict[int, list[int]] = {}  # by slot: blocks after which its prompt's chunks end, ascending
        self._last_border: dict[int, int] = {}  # by slot: blocks before its last snapshot
        self._restores: dict[int, int] = {}  # row by slot
        self._saves: dict[int, int] = {}  # slot by row

    @property
    def num_used(self) -> int:
        """Rows that hold a snapshot."""
        return len(self._snapshots)

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Blocks before the last snapshot among the first `num_blocks` blocks of a sequence; 0: there is none.

        The work is bounded by the number of snapshots.
        """
        lengths = sorted((length for length in self._num_by_length if length <= num_blocks), reverse=True)
        return next((length for length in lengths if hashes[length - 1] in self._snapshots), 0)

    # -- a request -----------------------------------------------------------------------------------------------------

    def begin(self, slot: int, hit: PrefixHit, num_tokens: int) -> None:
        """Start a request in `slot`: restore the state at the end of `hit`, and choose where snapshots are taken.

        Args:
            num_tokens: tokens that the request prefills, of which a later request may share all but the last.
        """
        if hit.num_blocks:
            key = hit.hashes[hit.num_blocks - 1]
            self._snapshots.move_to_end(key)
            self._restores[slot] = self._snapshots[key][0]
            self.restored_total += 1
        shared = hit.longest.num_blocks if hit.longest is not None else 0
        borders = {shared, (num_tokens - 1) // self._block_size}
        self._borders[slot] = sorted(border for border in borders if border > hit.num_blocks)
        self._last_border[slot] = hit.num_blocks

    def chunk_size(self, slot: int, begin: int, size: int, num_tokens: int) -> int:
        """The part of a chunk of `size` tokens from position `begin` up to the next snapshot, of `num_tokens` tokens to prefill."""
        blocks = (begin + size) // self._block_size
        border = next(
            (border for border in self._borders.get(slot, ()) if border * self._block_size > begin), blocks + 1
        )
        if border <= blocks:
            return border * self._block_size - begin
        if begin + size < num_tokens and blocks - self._last_border.get(slot, blocks) >= _INTERVAL:
            return max(blocks * self._block_size - begin, 0) or size
        return size

    def save(self, slot: int, hashes: Sequence[bytes], num_computed: int) -> None:
        """Take a snapshot after the step being built, which computes tokens up to `num_computed`, if one is due there.

        Args:
            hashes: of the slot's full blocks up to `num_computed`.
        """
        blocks, rest = divmod(num_computed, self._block_size)
        borders, last = self._borders.get(slot, ()), self._last_border.get(slot, blocks)
        if rest or (blocks not in borders and blocks - last < _INTERVAL):
            return
        self._last_border[slot] = blocks
        key = hashes[blocks - 1]
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return
        row = self._free.pop() if self._free else self._evict()
        self._snapshots[key] = row, blocks
        self._num_by_length[blocks] += 1
        self._saves[row] = slot
        self.saved_total += 1

    def _evict(self) -> int:
        """Drop the least recently used snapshot; returns its row."""
        _, (row, blocks) = self._snapshots.popitem(last=False)
        self._num_by_length[blocks] -= 1
        if not self._num_by_length[blocks]:
            del self._num_by_length[blocks]
        return row

    def release(self, slot: int) -> None:
        """Forget the request of a slot."""
        self._borders.pop(slot, None)
        self._last_border.pop(slot, None)
        self._restores.pop(slot, None)

    # -- a step --------------------------------------------------------------------------------------------------------

    def take_copies(self) -> dict[str, Copies]:
        """Copies of the step being built: `restores` before the model, `saves` after it; no two have the same target."""
        restores, saves = self._restores, self._saves
        self._restores, self._saves = {}, {}
        copies = {}
        if restores:
            copies["restores"] = _copies(restores.values(), restores)
        if saves:
            copies["saves"] = _copies(saves.values(), saves)
        return copies

    def clear(self) -> None:
        """Drop all snapshots; running requests keep their states."""
        while self._snapshots:
            self._free.append(self._evict())
        self._saves.clear()

    def check(self) -> None:
        """Raise AssertionError unless every row is free or holds one snapshot, as between two steps."""
        rows = sorted([*self._free, *(row for row, _ in self._snapshots.values())])
        assert rows == list(self._rows), "a snapshot's row was lost, or is used twice"
        assert self._num_by_length == Counter(blocks for _, blocks in self._snapshots.values())
        assert not self._saves, "a snapshot was chosen and not taken"


def _copies(sources: Iterable[int], targets: Iterable[int]) -> Copies:
    return np.fromiter(sources, np.int64), np.fromiter(targets, np.int64)
