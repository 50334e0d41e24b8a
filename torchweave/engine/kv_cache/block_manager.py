"""Block manager of the paged KV cache: free blocks, the blocks of each sequence, and prefix reuse.

Only block numbers are kept here; the blocks are on the device. All work is on arrays, so granting blocks to hundreds of sequences
costs as much as granting one.

A sequence takes one block in every group of layers (`torchweave.engine.kv_cache.layer_groups`) for each `block_size` tokens: a
*logical block*. Most models have one group. A group with an attention window frees blocks that have left the window.

A full block is identified by the hash of its tokens and of all tokens before them. Sequences with a common prefix share blocks,
which are reference-counted; an unreferenced block keeps its content until its memory is needed, least recently used first.
Evicted blocks may be kept in host memory (`torchweave.engine.kv_cache.cpu_offload`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchweave.engine.kv_cache.cpu_offload import HostBlockPool
from torchweave.engine.kv_cache.prefix_index import NO_BLOCK, NO_HIT, BlockGrant, PrefixHit, PrefixIndex
from torchweave.engine.kv_cache.state_snapshots import StateSnapshots

OFFLOAD_AHEAD_BLOCKS = 64  # below this many empty blocks, the next ones to be evicted are copied to the host in advance


@dataclass(frozen=True)
class AttentionWindow:
    """Keys that a query attends to: the last `window` ones including itself, and those of its `chunk`; 0: no bound."""

    window: int = 0
    chunk: int = 0

    @cached_property
    def max_keys(self) -> int:
        """Most keys that a query attends to; 0: no bound."""
        return min((size for size in (self.window, self.chunk) if size), default=0)

    def first_visible(self, positions: np.ndarray) -> np.ndarray:
        """First position that queries at `positions` attend to, or an earlier one."""
        first_visible = np.zeros_like(positions)
        if self.window:
            first_visible = np.maximum(positions - self.window + 1, first_visible)
        if self.chunk:
            first_visible = np.maximum(positions // self.chunk * self.chunk, first_visible)
        return first_visible

    def resets_at(self, position: int) -> bool:
        """Whether a query at `position` attends only to itself."""
        return self.window == 1 or bool(self.chunk and position % self.chunk == 0)

    def most_tokens(self, num_tokens: int, longest_step: int) -> int:
        """Most tokens that a sequence of `num_tokens` stores at a time, if a step adds at most `longest_step`."""
        return min(num_tokens, self.max_keys + longest_step) if self.max_keys else num_tokens


def max_blocks_needed(windows: Sequence[AttentionWindow], num_tokens: int, step: int, block_size: int) -> list[int]:
    """Most blocks, by group, that a sequence of `num_tokens` tokens holds at a time, if a step adds at most `step`."""
    num_logical_blocks = -(-num_tokens // block_size)
    tokens = (window.most_tokens(num_tokens, step) for window in windows)
    return [min(-(-each // block_size) + 1, num_logical_blocks) for each in tokens]


class BlockManager:
    """Owner of the block numbers.

    Args:
        num_blocks: blocks on the device.
        block_size: tokens per block.
        max_slots: most sequences with blocks at a time.
        max_blocks_per_slot: width of the block table.
        windows: attention window of each group of layers.
        longest_step: most tokens that a step adds to a sequence.
        host: pool for evicted blocks in host memory; None: evicted blocks are lost.
        snapshots: recurrent states at block borders, without which no prefix is reused; None for models without such states.

    Attributes:
        table: int32 `[groups, slots, max_blocks_per_slot]`.
        held_blocks: int64 `[slots]`, logical blocks of a slot, including the freed ones before `first`.
        first: int64 `[groups, slots]`, index of the first block that has not left the window.
        num_shared: int64 `[slots]`, leading logical blocks that were reused from the prefix cache or from another slot.
        reserved: int64 `[groups, slots]`, most blocks that a slot may hold.
        allocated_total, reused_total, missed_total: blocks allocated, reused, and looked up in vain so far.
        restored_total: reused blocks that came from host memory.
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
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)
        self.longest_step = longest_step
        self.host = host
        self.snapshots = snapshots
        self.table = np.full((self.num_groups, max_slots, max_blocks_per_slot), NO_BLOCK, np.int32)
        self.held_blocks = np.zeros(max_slots, np.int64)
        self.first = np.zeros((self.num_groups, max_slots), np.int64)
        self.num_shared = np.zeros(max_slots, np.int64)
        self.reserved = np.zeros((self.num_groups, max_slots), np.int64)
        self._window_groups = [group for group, window in enumerate(self.windows) if window.max_keys]
        self._full_groups = [group for group, window in enumerate(self.windows) if not window.max_keys]
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = num_blocks
        self._ref_counts = np.zeros(num_blocks, np.int32)  # number of slots with the block
        self._num_held = np.zeros(self.num_groups, np.int64)  # referenced blocks
        self._prefix_index = PrefixIndex(num_blocks)
        self._forked = np.zeros(num_blocks, bool)  # by a fork: may have several references without a hash
        self._evictable: OrderedDict[int, None] = OrderedDict()  # hashed and unreferenced, least recently used first
        self.allocated_total = self.reused_total = self.missed_total = 0
        self.restored_total = 0

    # -- counting ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be granted: empty and unreferenced ones."""
        return self._num_empty + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def has_windows(self) -> bool:
        """Whether a group of layers has an attention window."""
        return bool(self._window_groups)

    @property
    def free_logical_blocks(self) -> int:
        """Logical blocks that can be granted."""
        return self.num_free // self.num_groups

    @property
    def unreserved_logical_blocks(self) -> int:
        """Free logical blocks that no running request may need; negative if the reservations exceed the free blocks."""
        outstanding = 0
        for group, window in enumerate(self.windows):
            held = self._num_held[group] if window.max_keys else self.held_blocks.sum()
            outstanding += int(self.reserved[group].sum() - held)
        return (self.num_free - outstanding) // self.num_groups

    @property
    def exclusive_logical_blocks(self) -> np.ndarray:
        """Lower bound `[slots]` of the logical blocks that freeing a slot would free."""
        own = np.maximum(self.held_blocks - np.maximum(self.first, self.num_shared), 0)
        return own[0] if self.num_groups == 1 else own.sum(0) // self.num_groups

    def max_blocks_needed(self, num_tokens: int, step: int | None = None) -> list[int]:
        """Most blocks, by group, that a sequence of up to `num_tokens` tokens holds at a time, if a step adds at most `step`."""
        step = self.longest_step if step is None else min(step, self.longest_step)
        return max_blocks_needed(self.windows, num_tokens, step, self.block_size)

    def reserve(self, slot: int, num_tokens: int, step: int | None = None) -> None:
        """Reserve blocks for up to `num_tokens` tokens of a slot, of which a step adds at most `step` from now on."""
        self.reserved[:, slot] = self.max_blocks_needed(num_tokens, step)

    def reserve_fork(self, slot: int, num_tokens: int, num_shared: int) -> None:
        """Reserve blocks for an empty slot that will share its first `num_shared` logical blocks with another."""
        self.reserved[:, slot] = self.max_blocks_needed(num_tokens)
        self.reserved[self._full_groups, slot] -= num_shared

    def max_blocks_of_forks(self, num_tokens: int, width: int, num_shared: int) -> int:
        """Most blocks that `width` sequences hold at a time if they share their first `num_shared` logical blocks."""
        total = sum(self.max_blocks_needed(num_tokens)) * width
        return total - (width - 1) * num_shared * len(self._full_groups)

    def shrink_reservation(self, slot: int, num_computed: int, num_tokens: int, step: int) -> None:
        """Reduce the reservation of a slot after its prefill: smaller steps need fewer blocks in groups with windows."""
        if self._window_groups:
            self.free_out_of_window(np.array([slot]), np.array([num_computed]))
            self.reserve(slot, num_tokens, step)

    # -- granting ------------------------------------------------------------------------------------------------------

    def blocks_needed(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Logical blocks that each of `slots` still needs for `num_tokens` tokens."""
        return np.maximum((num_tokens + self.block_size - 1) // self.block_size - self.held_blocks[slots], 0)

    def grant(self, slots: np.ndarray, num_blocks: np.ndarray) -> BlockGrant:
        """Grant each slot further logical blocks; the caller ensures that they are free."""
        total, held = int(num_blocks.sum()), self.held_blocks[slots]
        blocks = self._allocate(total * self.num_groups).reshape(self.num_groups, total)
        owners = slots.repeat(num_blocks)
        block_indices = np.arange(total) + (held + num_blocks - num_blocks.cumsum()).repeat(num_blocks)
        held += num_blocks
        self.held_blocks[slots] = held
        self._num_held += total
        for table, reserved, first, new in zip(self.table, self.reserved, self.first, blocks, strict=True):
            table[owners, block_indices] = new
            reserved[slots] = np.maximum(reserved[slots], held - first[slots])
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
        """Take `count` free blocks, with one reference each. The least recently used ones lose their content."""
        assert count <= self.num_free, "a policy let a step run that the KV cache cannot hold"
        self._evict(count - self._num_empty)
        blocks = self._free[self._num_empty - count : self._num_empty][::-1].copy()
        self._num_empty -= count
        self._ref_counts[blocks] = 1
        self._forked[blocks] = False
        return blocks

    def _evict(self, count: int) -> None:
        """Evict the content of the `count` least recently used unreferenced blocks."""
        evicted = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        if self.host is not None and evicted:
            self.host.offload([self._prefix_index.key(block) for block in evicted], evicted)
        for block in evicted:
            self._prefix_index.remove(block)
            self._free[self._num_empty] = block
            self._num_empty += 1

    def free_out_of_window(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Free blocks that no query from `positions` on attends to.

        Steps in flight may still read them: a later step, which writes them, runs after those.
        """
        for group in self._window_groups:
            first = np.minimum(self.windows[group].first_visible(positions) // self.block_size, self.held_blocks[slots])
            moved = first > self.first[group, slots]
            for slot, to in zip(slots[moved].tolist(), first[moved].tolist(), strict=True):
                self._release_blocks(group, self.table[group, slot, self.first[group, slot] : to])
                self.first[group, slot] = to

    def _release_blocks(self, group: int, blocks: np.ndarray) -> None:
        """Drop one reference to each of `blocks`, a view of the table, and clear the view. Hashed blocks keep their content."""
        self._ref_counts[blocks] -= 1
        released = blocks[self._ref_counts[blocks] == 0]
        self._num_held[group] -= released.size
        hashed = self._prefix_index.version[released] > 0
        for block in released[hashed][::-1].tolist():  # the end of a sequence is evicted before its beginning
            self._evictable[block] = None
        empty = released[~hashed]
        self._free[self._num_empty : self._num_empty + empty.size] = empty
        self._num_empty += empty.size
        blocks[:] = NO_BLOCK

    def free(self, slot: int) -> None:
        """Free a slot's blocks and its reservation."""
        for group in range(self.num_groups):
            self._release_blocks(group, self.table[group, slot, self.first[group, slot] : self.held_blocks[slot]])
        self.held_blocks[slot] = self.num_shared[slot] = 0
        self.first[:, slot] = self.reserved[:, slot] = 0
        if self.host is not None:
            self.host.released(slot)
        if self.snapshots is not None:
            self.snapshots.release(slot)

    # -- prefix reuse --------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes], before: PrefixHit | None = None) -> PrefixHit:
        """The longest cached prefix of a sequence.

        Args:
            hashes: of its full blocks.
            before: an earlier result for the same sequence. Waiting requests are looked up in each step, and little changes.
        """
        if self.snapshots is None:
            return self._match_blocks(hashes, before)
        longest = self._match_blocks(hashes, None if before is None else before.longest)
        num_blocks = longest.num_blocks
        while num_blocks := self.snapshots.longest(hashes, num_blocks):
            hit = self._match_blocks(hashes[:num_blocks], before)
            if hit.num_blocks == num_blocks:
                return replace(hit, longest=longest)
            num_blocks = hit.num_blocks  # a group of layers lacks a block in its window
        return PrefixHit(longest=longest)

    def _match_blocks(self, hashes: Sequence[bytes], before: PrefixHit | None) -> PrefixHit:
        """The longest prefix whose blocks are cached."""
        before = before if before is not None and self._still_valid(before, len(hashes)) else NO_HIT
        num_blocks = self._longest_prefix(hashes, before.num_blocks)
        if not num_blocks:
            return NO_HIT
        blocks = np.full((self.num_groups, num_blocks), NO_BLOCK, np.int32)
        if before.blocks is not None:
            blocks[:, : before.num_blocks] = before.blocks
        on_host = 0
        for group in range(self.num_groups):
            first = max(self._first_visible_block(group, num_blocks), before.num_blocks)
            on_device = [self._prefix_index.block((group, each)) for each in hashes[first:num_blocks]]
            on_host += on_device.count(NO_BLOCK)
            blocks[group, first:] = on_device
        referenced = [int((self._ref_counts[row[row >= 0]] > 0).sum()) for row in blocks]
        unreferenced = int((blocks >= 0).sum()) - sum(referenced)
        in_full_groups = sum(referenced[group] for group in self._full_groups)
        version = self._prefix_index.version[blocks]
        return PrefixHit(num_blocks, hashes, blocks, version, unreferenced, on_host, in_full_groups)

    def _still_valid(self, hit: PrefixHit, max_blocks: int) -> bool:
        """Whether an earlier hit was entirely on the device and none of its blocks has changed."""
        if self._window_groups or hit.on_host or hit.num_blocks > max_blocks or hit.blocks is None:
            return False
        return bool((self._prefix_index.version[hit.blocks] == hit.version).all())

    def _first_visible_block(self, group: int, num_blocks: int) -> int:
        """Index of the first block that a sequence continuing after `num_blocks` blocks attends to."""
        if not self.windows[group].max_keys:
            return 0
        return int(self.windows[group].first_visible(np.array(num_blocks * self.block_size))) // self.block_size

    def _has_block(self, group: int, each: bytes) -> bool:
        return (group, each) in self._prefix_index or (self.host is not None and (group, each) in self.host)

    def _longest_prefix(self, hashes: Sequence[bytes], begin: int) -> int:
        """Length of the longest prefix, at least `begin` blocks, of which every group has all blocks in its window."""
        lengths = (self._longest_prefix_of_group(begin, group, hashes) for group in self._full_groups)
        num_blocks = min([len(hashes), *lengths])
        while num_blocks and (shorter := self._trim_to_windows(hashes, num_blocks)) < num_blocks:
            num_blocks = shorter
        return num_blocks

    def _longest_prefix_of_group(self, begin: int, group: int, hashes: Sequence[bytes]) -> int:
        """Length of the longest cached prefix in a group. Most are short, so few hashes are computed at a time."""
        end, size = begin, 1
        while begin < len(hashes):
            begin, end, size = end, min(end + size, len(hashes)), 2 * size
            for block_idx, each in enumerate(hashes[begin:end], start=begin):
                if not self._has_block(group, each):
                    return block_idx
        return len(hashes)

    def _trim_to_windows(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """`num_blocks`, if all groups have the blocks in their windows at its end; else an upper bound of valid lengths."""
        shorter = num_blocks
        for group in self._window_groups:
            visible = range(num_blocks - 1, self._first_visible_block(group, num_blocks) - 1, -1)
            gap = next((block_idx for block_idx in visible if not self._has_block(group, hashes[block_idx])), None)
            if gap is not None:
                ends = (length for length in range(gap, 0, -1) if self._can_end_at(group, hashes, length))
                shorter = min(next(ends, 0), shorter)
        return shorter

    def _can_end_at(self, group: int, hashes: Sequence[bytes], num_blocks: int) -> bool:
        """Whether a group has the last of `num_blocks` blocks, or no later query attends to it."""
        resets = self.windows[group].resets_at(num_blocks * self.block_size)
        return resets or self._has_block(group, hashes[num_blocks - 1])

    def attach(self, slot: int, hit: PrefixHit) -> BlockGrant:
        """Let an empty slot begin with a cached prefix. Blocks in host memory begin to load into new blocks."""
        assert not self.held_blocks[slot], "a slot shares blocks only at its beginning"
        assert hit.blocks is not None
        blocks = hit.blocks.copy()
        on_device = blocks[blocks >= 0]
        for block in on_device.tolist():
            self._evictable.pop(block, None)
        for group in range(self.num_groups):
            shared = blocks[group][blocks[group] >= 0]
            self._num_held[group] += int((self._ref_counts[shared] == 0).sum())
            self._ref_counts[shared] += 1
            self.first[group, slot] = self._first_visible_block(group, hit.num_blocks)
        self.held_blocks[slot] = self.num_shared[slot] = hit.num_blocks
        if hit.on_host:
            self._restore(hit, blocks)
        self.table[:, slot, : hit.num_blocks] = blocks
        self.reused_total += on_device.size + hit.on_host
        if self.host is not None:
            self.host.on_attach(slot, blocks[blocks >= 0])
        groups, block_indices = np.nonzero(blocks >= 0)
        return BlockGrant(groups * self.table.shape[1] + slot, block_indices, blocks[groups, block_indices])

    def _restore(self, hit: PrefixHit, blocks: np.ndarray) -> None:
        """Begin to load the host's part of `hit` into new blocks, and enter them into `blocks`."""
        assert self.host is not None
        first = np.array([self._first_visible_block(group, hit.num_blocks) for group in range(self.num_groups)])
        groups, block_indices = np.nonzero((np.arange(hit.num_blocks) >= first[:, None]) & (blocks < 0))
        indices = zip(groups.tolist(), block_indices.tolist(), strict=True)
        keys = [(group, hit.hashes[block_idx]) for group, block_idx in indices]
        host_blocks = self.host.pin(keys)
        new = self._allocate(len(keys))
        self.host.restore(host_blocks, new)
        blocks[groups, block_indices] = new
        self._num_held += np.bincount(groups, minlength=self.num_groups)
        for key, block in zip(keys, new.tolist(), strict=True):
            self._prefix_index.insert(key, block)
        self.restored_total += len(keys)

    def fork(self, parent: int, child: int, num_logical_blocks: int) -> BlockGrant:
        """Let an empty slot share the first blocks of another, all full."""
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
        """Whether a sequence continuing after the slot's first blocks would find all blocks that it attends to."""
        return all(
            self.first[group, slot] <= self._first_visible_block(group, num_logical_blocks)
            for group in self._window_groups
        )

    def num_freeable(self, slots: Sequence[int]) -> int:
        """Lower bound of the logical blocks that freeing all of `slots` would free."""
        parts = [
            self.table[group, slot, self.first[group, slot] : self.held_blocks[slot]]
            for slot in slots
            for group in range(self.num_groups)
        ]
        if not parts:
            return 0
        blocks, counts = np.unique(np.concatenate(parts), return_counts=True)
        return int((self._ref_counts[blocks] == counts).sum()) // self.num_groups

    def cache_full_blocks(self, slot: int, hashes: Sequence[bytes], first: int = 0) -> None:
        """Enter a slot's blocks from index `first` on into the prefix cache, under `hashes[first:]`: their tokens are computed.

        If two sequences compute the same tokens in parallel, only one of the blocks is entered.
        """
        for group in range(self.num_groups):
            begin = max(first, int(self.first[group, slot]))
            blocks = self.table[group, slot, begin : len(hashes)]
            new = (self._prefix_index.version[blocks] == 0).nonzero()[0]  # most blocks of a long sequence are cached
            for block_idx, block in zip((begin + new).tolist(), blocks[new].tolist(), strict=True):
                key = group, hashes[block_idx]
                if key not in self._prefix_index:
                    self._prefix_index.insert(key, block)

    def ready(self, slot: int) -> bool:
        """Whether all blocks of a slot's cached prefix are on the device."""
        return self.host is None or self.host.ready(slot)

    def reset(self) -> None:
        """Clear the prefix cache: unreferenced blocks become empty, on the host too."""
        host, self.host = self.host, None
        self._evict(len(self._evictable))
        self.host = host
        self._prefix_index.reset()
        if host is not None:
            host.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def _offload_ahead(self, host: HostBlockPool) -> None:
        """Copy the next blocks to be evicted to the host, so that no step waits for the copy at the eviction."""
        if self._num_empty < OFFLOAD_AHEAD_BLOCKS:
            candidates = itertools.islice(self._evictable, OFFLOAD_AHEAD_BLOCKS - self._num_empty)
            blocks = [block for block in candidates if self._prefix_index.key(block) not in host]
            host.offload([self._prefix_index.key(block) for block in blocks], blocks, evicted=False)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache."""
        return len(self._prefix_index)

    def check(self) -> None:
        """Raise AssertionError unless every block is empty, cached and unreferenced, or referenced by exactly its slots."""
        holders = np.zeros((self.num_groups, self.num_blocks), np.int64)
        for group in range(self.num_groups):
            parts = [
                self.table[group, slot, self.first[group, slot] : end] for slot, end in enumerate(self.held_blocks)
            ]
            holders[group] = np.bincount(np.concatenate(parts), minlength=self.num_blocks)
        index, version = self._prefix_index, self._prefix_index.version
        assert ((holders > 0).sum(0) <= 1).all(), "a block is held in two groups"
        assert np.array_equal(holders.sum(0), self._ref_counts), (
            "a block is held by more or fewer slots than are counted"
        )
        assert np.array_equal((holders > 0).sum(1), self._num_held), (
            "a group holds more or fewer blocks than are counted"
        )
        shared = self._ref_counts > 1
        assert not (shared & (version == 0) & ~self._forked).any(), "a block without a hash is held twice"
        empty = self._free[: self._num_empty]
        blocks = [np.flatnonzero(self._ref_counts), empty, np.fromiter(self._evictable, np.int64)]
        assert np.array_equal(np.sort(np.concatenate(blocks)), np.arange(self.num_blocks)), (
            "a block was lost, or is held and free"
        )
        assert not version[empty].any() and all(version[block] for block in self._evictable)
        assert len(index) == np.count_nonzero(version)
        for key, block in index.items():
            assert index.key(block) == key and version[block], "a block is cached under a wrong hash"
            assert not holders[:, block].any() or holders[key[0], block], (
                "a block is cached in one group and held in another"
            )
        assert (self.reserved >= self.held_blocks - self.first).all(), "a slot holds more than was reserved for it"
        assert (self.num_shared <= self.held_blocks).all() and (self.first <= self.held_blocks).all()
        if self.host is not None:
            self.host.check()
        if self.snapshots is not None:
            self.snapshots.check()
