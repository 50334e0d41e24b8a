"""Blocks of the paged KV cache: which are free, which sequences hold which, and which can be used again.

The blocks themselves live on the device; here are their numbers only. All work is on arrays, so that granting blocks to
hundreds of sequences costs no more than granting one.

A sequence takes one block in every group of layers (`torchweave.engine.kv_cache.layer_groups`) for each `block_size`
tokens: a *column*. Most
models have one group, where a column is a block. A group with a window gives the blocks of old columns back.

A full block is known by the hash of its tokens and of all tokens before them. Sequences that begin alike hold the same blocks,
each counted; a block that nobody holds any more keeps its content until its memory is needed, the least recently used first. What
is lost on the device may be kept in host memory (`torchweave.engine.kv_cache.cpu_offload`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from torchweave.engine.kv_cache.cpu_offload import HostBlockPool
from torchweave.engine.kv_cache.invariants import check_blocks
from torchweave.engine.kv_cache.layer_groups import AttentionWindow, max_blocks_needed
from torchweave.engine.kv_cache.prefix_index import NO_BLOCK, BlockGrant, PrefixHit, PrefixIndex

OFFLOAD_AHEAD_BLOCKS = (
    64  # blocks: where fewer are empty, the next ones to be lost are copied to the host before they are
)


class BlockManager:
    """Owner of the block numbers.

    Args:
        num_blocks: blocks on the device.
        block_size: tokens in a block.
        max_slots: sequences that can hold blocks at once.
        max_blocks_per_slot: columns of the block table.
        windows: how far back the layers of each group see.
        longest_step: most tokens by which a sequence grows in one step.
        host: keeps what is lost on the device; None: nothing does.

    Attributes:
        table: int32 `[groups, slots, block_indices]`.
        held_blocks: columns that a slot covers; the first `first[group, slot]` of them were given back.
        num_shared: of these, the first so many were another's before.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_slots: int,
        max_blocks_per_slot: int,
        windows: Sequence[AttentionWindow] = (AttentionWindow(),),
        longest_step: int = 1,
        host: HostBlockPool | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)
        self.longest_step = longest_step
        self.host = host
        self.table = np.full((self.num_groups, max_slots, max_blocks_per_slot), NO_BLOCK, np.int32)
        self.held_blocks = np.zeros(max_slots, np.int64)
        self.first = np.zeros((self.num_groups, max_slots), np.int64)
        self.num_shared = np.zeros(max_slots, np.int64)
        self.reserved = np.zeros((self.num_groups, max_slots), np.int64)  # most blocks that a slot may come to hold
        self._window_groups = [group for group, window in enumerate(self.windows) if window.max_keys]
        self._full_groups = [group for group, window in enumerate(self.windows) if not window.max_keys]
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = num_blocks
        self._ref_counts = np.zeros(num_blocks, np.int32)  # slots that hold a block
        self._num_held = np.zeros(self.num_groups, np.int64)  # blocks that somebody holds
        self._prefix_index = PrefixIndex(num_blocks)
        self._forked = np.zeros(num_blocks, bool)  # by a fork: may be held several times though known to nobody
        self._evictable: OrderedDict[int, None] = OrderedDict()  # known, held by nobody, least recently used first
        self.allocated_total = self.reused_total = self.missed_total = 0
        self.restored_total = 0  # of the reused ones, those that the host had

    # -- counting ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be granted: empty ones, and those whose content nobody holds."""
        return self._num_empty + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def free_logical_blocks(self) -> int:
        """Columns that can be granted."""
        return self.num_free // self.num_groups

    @property
    def unreserved_logical_blocks(self) -> int:
        """Of these, what no running request may come to need; negative where less was promised than may be asked for."""
        promised = 0
        for group, window in enumerate(self.windows):
            now = self._num_held[group] if window.max_keys else self.held_blocks.sum()
            promised += int(self.reserved[group].sum() - now)
        return (self.num_free - promised) // self.num_groups

    @property
    def exclusive_logical_blocks(self) -> np.ndarray:
        """Columns `[slots]` that would come free, at the least, if a slot gave all back."""
        own = np.maximum(self.held_blocks - np.maximum(self.first, self.num_shared), 0)
        return own[0] if self.num_groups == 1 else own.sum(0) // self.num_groups

    def max_blocks_needed(self, num_tokens: int, step: int | None = None) -> np.ndarray:
        """Most blocks of each group that a sequence of `num_tokens` tokens holds at once, if it grows by at most `step`."""
        step = self.longest_step if step is None else min(step, self.longest_step)
        return max_blocks_needed(self.windows, num_tokens, step, self.block_size)

    def reserve(self, slot: int, num_tokens: int, step: int | None = None) -> None:
        """Note that a slot may come to hold `num_tokens` tokens, of which one step adds at most `step` from here on."""
        self.reserved[:, slot] = self.max_blocks_needed(num_tokens, step)

    def reserve_fork(self, slot: int, num_tokens: int, common: int) -> None:
        """The same for an empty slot that will begin with `common` columns of another."""
        self.reserved[:, slot] = self.max_blocks_needed(num_tokens)
        self.reserved[self._full_groups, slot] -= common

    def max_blocks_of_forks(self, num_tokens: int, width: int, common: int) -> int:
        """Most blocks that `width` sequences hold at once whose first `common` columns are the same."""
        most = width * self.max_blocks_needed(num_tokens)
        return int(most.sum()) - (width - 1) * common * (self.num_groups - len(self._window_groups))

    def shrink_reservation(self, slot: int, num_computed: int, num_tokens: int, step: int) -> None:
        """A slot whose prompt has been read grows by little from here on, and needs less in groups with windows."""
        if self._window_groups:
            self.free_out_of_window(np.array([slot]), np.array([num_computed]))
            self.reserve(slot, num_tokens, step)

    # -- granting ------------------------------------------------------------------------------------------------------

    def blocks_needed(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Columns that each of `slots` lacks to hold `num_tokens` tokens."""
        return np.maximum(-(-num_tokens // self.block_size) - self.held_blocks[slots], 0)

    def grant(self, slots: np.ndarray, num_tokens: np.ndarray) -> BlockGrant:
        """Give each slot the columns it lacks to hold `num_tokens` tokens. The caller has made sure that they fit."""
        need = self.blocks_needed(slots, num_tokens)
        total = int(need.sum())
        blocks = self._allocate(total * self.num_groups).reshape(self.num_groups, total)
        owners = np.repeat(slots, need)
        first = np.repeat(np.cumsum(need) - need, need)
        block_indices = np.arange(total) - first + np.repeat(self.held_blocks[slots], need)
        self.table[:, owners, block_indices] = blocks
        self.held_blocks[slots] += need
        self._num_held += total
        self.reserved[:, slots] = np.maximum(self.reserved[:, slots], self.held_blocks[slots] - self.first[:, slots])
        self.allocated_total += total * self.num_groups
        if self.host is not None and total:
            self._offload_ahead(self.host)
        return self._make_grant(owners, block_indices, blocks)

    def _make_grant(self, owners: np.ndarray, block_indices: np.ndarray, blocks: np.ndarray) -> BlockGrant:
        if self.num_groups == 1:
            return BlockGrant(owners, block_indices, blocks[0])
        rows = np.arange(self.num_groups)[:, None] * self.table.shape[1] + owners
        return BlockGrant(rows.ravel(), np.tile(block_indices, self.num_groups), blocks.ravel())

    def _allocate(self, count: int) -> np.ndarray:
        """So many free blocks, each held once from now on; what the least recently used ones held is lost."""
        assert count <= self.num_free, "a policy let a step run that the KV cache cannot hold"
        self._evict(count - self._num_empty)
        blocks = self._free[self._num_empty - count : self._num_empty][::-1].copy()
        self._num_empty -= count
        self._ref_counts[blocks] = 1
        self._forked[blocks] = False
        return blocks

    def _evict(self, count: int) -> None:
        """Forget the content of the `count` least recently used blocks that nobody holds."""
        lost = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        if self.host is not None and lost:
            self.host.offload([self._prefix_index.key(block) for block in lost], lost)
        for block in lost:
            self._prefix_index.remove(block)
            self._free[self._num_empty] = block
            self._num_empty += 1

    def free_out_of_window(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Take back blocks that no query from `positions` on will see. Steps in flight may read them: later ones write later."""
        for group in self._window_groups:
            first = np.minimum(self.windows[group].first_visible(positions) // self.block_size, self.held_blocks[slots])
            moved = first > self.first[group, slots]
            for slot, to in zip(slots[moved].tolist(), first[moved].tolist(), strict=True):
                self._release_blocks(group, self.table[group, slot, self.first[group, slot] : to])
                self.first[group, slot] = to

    def _release_blocks(self, group: int, blocks: np.ndarray) -> None:
        """One holder less; `blocks`, a part of the table, is cleared. What is known by a hash keeps its content."""
        self._ref_counts[blocks] -= 1
        released = blocks[self._ref_counts[blocks] == 0]
        self._num_held[group] -= released.size
        known = self._prefix_index.version[released] > 0
        for block in released[known][
            ::-1
        ].tolist():  # the end of a sequence is of less use to others than its beginning
            self._evictable[block] = None
        empty = released[~known]
        self._free[self._num_empty : self._num_empty + empty.size] = empty
        self._num_empty += empty.size
        blocks[:] = NO_BLOCK

    def free(self, slot: int) -> None:
        """Take back a slot's blocks and its reservation."""
        for group in range(self.num_groups):
            self._release_blocks(group, self.table[group, slot, self.first[group, slot] : self.held_blocks[slot]])
        self.held_blocks[slot] = self.num_shared[slot] = 0
        self.first[:, slot] = self.reserved[:, slot] = 0
        if self.host is not None:
            self.host.released(slot)

    # -- using blocks again --------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes], before: PrefixHit | None = None) -> PrefixHit:
        """The longest known beginning of a sequence.

        Args:
            before: what was found of it earlier. Requests that wait are looked at again in each step, and little has changed.
        """
        before = before if before is not None and self._still_valid(before, len(hashes)) else PrefixHit()
        block_indices = self._longest_prefix(hashes, before.block_indices)
        if not block_indices:
            return PrefixHit()
        blocks = np.full((self.num_groups, block_indices), NO_BLOCK, np.int32)
        if before.blocks is not None:
            blocks[:, : before.block_indices] = before.blocks
        on_host = 0
        for group in range(self.num_groups):
            first = max(self._first_visible_block(group, block_indices), before.block_indices)
            found = [self._prefix_index.block((group, each)) for each in hashes[first:block_indices]]
            on_host += found.count(NO_BLOCK)
            blocks[group, first:] = found
        referenced = [int((self._ref_counts[row[row >= 0]] > 0).sum()) for row in blocks]
        unreferenced = int((blocks >= 0).sum()) - sum(referenced)
        kept = sum(referenced[group] for group in self._full_groups)
        return PrefixHit(block_indices, hashes, blocks, self._prefix_index.version[blocks], unreferenced, on_host, kept)

    def _still_valid(self, match: PrefixHit, most: int) -> bool:
        """Whether columns found earlier need not be looked for again: each had a block, and all of these hold what they held."""
        if self._window_groups or match.on_host or match.block_indices > most or match.blocks is None:
            return False
        return bool((self._prefix_index.version[match.blocks] == match.version).all())

    def _first_visible_block(self, group: int, block_indices: int) -> int:
        """First column that a sequence which goes on behind `block_indices` sees."""
        window = self.windows[group]
        return (
            int(window.first_visible(np.array(block_indices * self.block_size))) // self.block_size
            if window.max_keys
            else 0
        )

    def _has_block(self, group: int, each: bytes) -> bool:
        return (group, each) in self._prefix_index or (self.host is not None and (group, each) in self.host)

    def _longest_prefix(self, hashes: Sequence[bytes], begin: int) -> int:
        """Length of the longest beginning, `begin` columns or more, of which every group knows all that it will look at."""
        block_indices = min(
            [len(hashes), *(self._longest_prefix_of_group(begin, group, hashes) for group in self._full_groups)]
        )
        while block_indices and (shorter := self._trim_to_windows(hashes, block_indices)) < block_indices:
            block_indices = shorter
        return block_indices

    def _longest_prefix_of_group(self, begin: int, group: int, hashes: Sequence[bytes]) -> int:
        """Length of the longest beginning that a group knows. Of most it knows none, so that few of the hashes are asked for."""
        end, size = begin, 1
        while begin < len(hashes):
            begin, end, size = end, min(end + size, len(hashes)), 2 * size
            for block_idx, each in enumerate(hashes[begin:end], start=begin):
                if not self._has_block(group, each):
                    return block_idx
        return len(hashes)

    def _trim_to_windows(self, hashes: Sequence[bytes], block_indices: int) -> int:
        """`block_indices`, if all groups know what is within their windows at its end; else a length that no longer
        one may have."""
        shorter = block_indices
        for group in self._window_groups:
            seen = range(block_indices - 1, self._first_visible_block(group, block_indices) - 1, -1)
            gap = next((block_idx for block_idx in seen if not self._has_block(group, hashes[block_idx])), None)
            if gap is not None:
                ends = (length for length in range(gap, 0, -1) if self._can_end_at(group, hashes, length))
                shorter = min(next(ends, 0), shorter)
        return shorter

    def _can_end_at(self, group: int, hashes: Sequence[bytes], block_indices: int) -> bool:
        """Whether the last of so many columns is known to a group, or seen by nothing that comes behind."""
        return self._has_block(group, hashes[block_indices - 1]) or self.windows[group].resets_at(
            block_indices * self.block_size
        )

    def attach(self, slot: int, match: PrefixHit) -> BlockGrant:
        """Let an empty slot begin with what `match` found; what the host has is on its way into new blocks."""
        assert not self.held_blocks[slot], "a slot shares blocks only at its beginning"
        assert match.blocks is not None
        blocks = match.blocks.copy()
        found = blocks[blocks >= 0]
        for block in found.tolist():
            self._evictable.pop(block, None)
        for group in range(self.num_groups):
            mine = blocks[group][blocks[group] >= 0]
            self._num_held[group] += int((self._ref_counts[mine] == 0).sum())
            self._ref_counts[mine] += 1
            self.first[group, slot] = self._first_visible_block(group, match.block_indices)
        self.held_blocks[slot] = self.num_shared[slot] = match.block_indices
        if match.on_host:
            self._restore(match, blocks)
        self.table[:, slot, : match.block_indices] = blocks
        self.reused_total += found.size + match.on_host
        if self.host is not None:
            self.host.on_attach(slot, blocks[blocks >= 0])
        groups, block_indices = np.nonzero(blocks >= 0)
        return BlockGrant(groups * self.table.shape[1] + slot, block_indices, blocks[groups, block_indices])

    def _restore(self, match: PrefixHit, blocks: np.ndarray) -> None:
        """Begin to copy what `match` found on the host into blocks of the device, and enter them."""
        assert self.host is not None
        first = np.array([self._first_visible_block(group, match.block_indices) for group in range(self.num_groups)])
        groups, block_indices = np.nonzero((np.arange(match.block_indices) >= first[:, None]) & (blocks < 0))
        keys = [
            (group, match.hashes[block_idx])
            for group, block_idx in zip(groups.tolist(), block_indices.tolist(), strict=True)
        ]
        host_blocks = self.host.pin(keys)
        new = self._allocate(len(keys))
        self.host.restore(host_blocks, new)
        blocks[groups, block_indices] = new
        self._num_held += np.bincount(groups, minlength=self.num_groups)
        for key, block in zip(keys, new.tolist(), strict=True):
            self._prefix_index.insert(key, block)
        self.restored_total += len(keys)

    def fork(self, parent: int, child: int, num_logical_blocks: int) -> BlockGrant:
        """Let an empty slot begin with the first columns of another; all of them are full."""
        assert not self.held_blocks[child], "a slot shares blocks only at its beginning"
        for group in range(self.num_groups):
            first = min(int(self.first[group, parent]), num_logical_blocks)
            blocks = self.table[group, parent, first:num_logical_blocks]
            self._ref_counts[blocks] += 1
            self._forked[blocks] = True
            self.table[group, child, first:num_logical_blocks] = blocks
            self.first[group, child] = first
        self.held_blocks[child] = self.num_shared[child] = num_logical_blocks
        groups, block_indices = np.nonzero(self.table[:, child, :num_logical_blocks] != NO_BLOCK)
        return BlockGrant(groups * self.table.shape[1] + child, block_indices, self.table[groups, child, block_indices])

    def covers_window(self, slot: int, num_logical_blocks: int) -> bool:
        """Whether a sequence that goes on behind the first columns of a slot would find all that it looks at."""
        return all(
            self.first[group, slot] <= self._first_visible_block(group, num_logical_blocks)
            for group in self._window_groups
        )

    def num_freeable(self, slots: Sequence[int]) -> int:
        """Columns' worth of blocks that would come free, at the least, if all of `slots` were freed."""
        held_blocks = [
            self.table[group, slot, self.first[group, slot] : self.held_blocks[slot]]
            for slot in slots
            for group in range(self.num_groups)
        ]
        if not held_blocks:
            return 0
        blocks, counts = np.unique(np.concatenate(held_blocks), return_counts=True)
        return int((self._ref_counts[blocks] == counts).sum()) // self.num_groups

    def cache_full_blocks(self, slot: int, hashes: Sequence[bytes], first: int = 0) -> None:
        """Make a slot's columns `first`, `first + 1`, ... known by `hashes[first:]`: all their tokens have been read.

        Where two sequences read the same tokens at once, one block is known and the other stays its owner's own.
        """
        for group in range(self.num_groups):
            begin = max(first, int(self.first[group, slot]))
            blocks = self.table[group, slot, begin : len(hashes)]
            new = np.flatnonzero(
                self._prefix_index.version[blocks] == 0
            )  # of a long sequence most were published before
            for block_idx, block in zip((begin + new).tolist(), blocks[new].tolist(), strict=True):
                key = group, hashes[block_idx]
                if key not in self._prefix_index:
                    self._prefix_index.insert(key, block)

    def ready(self, slot: int) -> bool:
        """Whether all that a slot began with is on the device."""
        return self.host is None or self.host.ready(slot)

    def reset(self) -> None:
        """Make nothing known any more: the blocks that nobody holds become empty, and the host's as well."""
        host, self.host = self.host, None
        self._evict(len(self._evictable))
        self.host = host
        self._prefix_index.reset()
        if host is not None:
            host.clear()

    def _offload_ahead(self, host: HostBlockPool) -> None:
        """Let the host have those that are lost next, so that no step has to wait for that then."""
        if self._num_empty < OFFLOAD_AHEAD_BLOCKS:
            some = itertools.islice(self._evictable, OFFLOAD_AHEAD_BLOCKS - self._num_empty)
            next_lost = [block for block in some if self._prefix_index.key(block) not in host]
            host.offload([self._prefix_index.key(block) for block in next_lost], next_lost, lost=False)

    @property
    def num_cached(self) -> int:
        """Blocks that a new sequence could begin with."""
        return len(self._prefix_index)

    def check(self) -> None:
        """Raise AssertionError unless every block is empty, known and idle, or held by exactly those slots that count it."""
        check_blocks(self)
