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

from torchweave.engine.kv_cache.cpu_offload import HostPool
from torchweave.engine.kv_cache.invariants import check_blocks
from torchweave.engine.kv_cache.layer_groups import Sight, most_blocks
from torchweave.engine.kv_cache.prefix_index import NOT_KNOWN, Grant, Known, Match

AHEAD = 64  # blocks: where fewer are empty, the next ones to be lost are copied to the host before they are


class KVCache:
    """Owner of the block numbers.

    Args:
        num_blocks: blocks on the device.
        block_size: tokens in a block.
        max_slots: sequences that can hold blocks at once.
        max_blocks_per_slot: columns of the block table.
        sights: how far back the layers of each group see.
        longest_step: most tokens by which a sequence grows in one step.
        host: keeps what is lost on the device; None: nothing does.

    Attributes:
        table: int32 `[groups, slots, columns]`.
        held: columns that a slot covers; the first `first[group, slot]` of them were given back.
        shared: of these, the first so many were another's before.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_slots: int,
        max_blocks_per_slot: int,
        sights: Sequence[Sight] = (Sight(),),
        longest_step: int = 1,
        host: HostPool | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sights = tuple(sights)
        self.num_groups = len(self.sights)
        self.longest_step = longest_step
        self.host = host
        self.table = np.full((self.num_groups, max_slots, max_blocks_per_slot), NOT_KNOWN, np.int32)
        self.held = np.zeros(max_slots, np.int64)
        self.first = np.zeros((self.num_groups, max_slots), np.int64)
        self.shared = np.zeros(max_slots, np.int64)
        self.reserved = np.zeros((self.num_groups, max_slots), np.int64)  # most blocks that a slot may come to hold
        self._windowed = [group for group, sight in enumerate(self.sights) if sight.reach]
        self._whole = [group for group, sight in enumerate(self.sights) if not sight.reach]
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = num_blocks
        self._holders = np.zeros(num_blocks, np.int32)  # slots that hold a block
        self._num_held = np.zeros(self.num_groups, np.int64)  # blocks that somebody holds
        self._known = Known(num_blocks)
        self._forked = np.zeros(num_blocks, bool)  # by a fork: may be held several times though known to nobody
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody, least recently used first
        self.allocated_total = self.reused_total = self.missed_total = 0
        self.restored_total = 0  # of the reused ones, those that the host had

    # -- counting ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be granted: empty ones, and those whose content nobody holds."""
        return self._num_empty + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def free_columns(self) -> int:
        """Columns that can be granted."""
        return self.num_free // self.num_groups

    @property
    def unreserved_columns(self) -> int:
        """Of these, what no running request may come to need; negative where less was promised than may be asked for."""
        promised = 0
        for group, sight in enumerate(self.sights):
            now = self._num_held[group] if sight.reach else self.held.sum()
            promised += int(self.reserved[group].sum() - now)
        return (self.num_free - promised) // self.num_groups

    @property
    def own_columns(self) -> np.ndarray:
        """Columns `[slots]` that would come free, at the least, if a slot gave all back."""
        own = np.maximum(self.held - np.maximum(self.first, self.shared), 0)
        return own[0] if self.num_groups == 1 else own.sum(0) // self.num_groups

    def most_blocks(self, num_tokens: int, step: int | None = None) -> np.ndarray:
        """Most blocks of each group that a sequence of `num_tokens` tokens holds at once, if it grows by at most `step`."""
        step = self.longest_step if step is None else min(step, self.longest_step)
        return most_blocks(self.sights, num_tokens, step, self.block_size)

    def reserve(self, slot: int, num_tokens: int, step: int | None = None) -> None:
        """Note that a slot may come to hold `num_tokens` tokens, of which one step adds at most `step` from here on."""
        self.reserved[:, slot] = self.most_blocks(num_tokens, step)

    def reserve_fork(self, slot: int, num_tokens: int, common: int) -> None:
        """The same for an empty slot that will begin with `common` columns of another."""
        self.reserved[:, slot] = self.most_blocks(num_tokens)
        self.reserved[self._whole, slot] -= common

    def most_blocks_of_forks(self, num_tokens: int, width: int, common: int) -> int:
        """Most blocks that `width` sequences hold at once whose first `common` columns are the same."""
        most = width * self.most_blocks(num_tokens)
        return int(most.sum()) - (width - 1) * common * (self.num_groups - len(self._windowed))

    def narrow(self, slot: int, num_computed: int, num_tokens: int, step: int) -> None:
        """A slot whose prompt has been read grows by little from here on, and needs less in groups with windows."""
        if self._windowed:
            self.slide(np.array([slot]), np.array([num_computed]))
            self.reserve(slot, num_tokens, step)

    # -- granting ------------------------------------------------------------------------------------------------------

    def lacking(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Columns that each of `slots` lacks to hold `num_tokens` tokens."""
        return np.maximum(-(-num_tokens // self.block_size) - self.held[slots], 0)

    def grant(self, slots: np.ndarray, num_tokens: np.ndarray) -> Grant:
        """Give each slot the columns it lacks to hold `num_tokens` tokens. The caller has made sure that they fit."""
        need = self.lacking(slots, num_tokens)
        total = int(need.sum())
        blocks = self._take(total * self.num_groups).reshape(self.num_groups, total)
        owners = np.repeat(slots, need)
        first = np.repeat(np.cumsum(need) - need, need)
        columns = np.arange(total) - first + np.repeat(self.held[slots], need)
        self.table[:, owners, columns] = blocks
        self.held[slots] += need
        self._num_held += total
        self.reserved[:, slots] = np.maximum(self.reserved[:, slots], self.held[slots] - self.first[:, slots])
        self.allocated_total += total * self.num_groups
        if self.host is not None and total:
            self._copy_ahead(self.host)
        return self._granted(owners, columns, blocks)

    def _granted(self, owners: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> Grant:
        if self.num_groups == 1:
            return Grant(owners, columns, blocks[0])
        rows = np.arange(self.num_groups)[:, None] * self.table.shape[1] + owners
        return Grant(rows.ravel(), np.tile(columns, self.num_groups), blocks.ravel())

    def _take(self, count: int) -> np.ndarray:
        """So many free blocks, each held once from now on; what the least recently used ones held is lost."""
        assert count <= self.num_free, "a policy let a step run that the KV cache cannot hold"
        self._empty(count - self._num_empty)
        blocks = self._free[self._num_empty - count : self._num_empty][::-1].copy()
        self._num_empty -= count
        self._holders[blocks] = 1
        self._forked[blocks] = False
        return blocks

    def _empty(self, count: int) -> None:
        """Forget the content of the `count` least recently used blocks that nobody holds."""
        lost = [self._idle.popitem(last=False)[0] for _ in range(count)]
        if self.host is not None and lost:
            self.host.keep([self._known.key(block) for block in lost], lost)
        for block in lost:
            self._known.forget(block)
            self._free[self._num_empty] = block
            self._num_empty += 1

    def slide(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Take back blocks that no query from `positions` on will see. Steps in flight may read them: later ones write later."""
        for group in self._windowed:
            first = np.minimum(self.sights[group].lowest(positions) // self.block_size, self.held[slots])
            moved = first > self.first[group, slots]
            for slot, to in zip(slots[moved].tolist(), first[moved].tolist(), strict=True):
                self._let_go(group, self.table[group, slot, self.first[group, slot] : to])
                self.first[group, slot] = to

    def _let_go(self, group: int, blocks: np.ndarray) -> None:
        """One holder less; `blocks`, a part of the table, is cleared. What is known by a hash keeps its content."""
        self._holders[blocks] -= 1
        left = blocks[self._holders[blocks] == 0]
        self._num_held[group] -= left.size
        known = self._known.since[left] > 0
        for block in left[known][::-1].tolist():  # the end of a sequence is of less use to others than its beginning
            self._idle[block] = None
        empty = left[~known]
        self._free[self._num_empty : self._num_empty + empty.size] = empty
        self._num_empty += empty.size
        blocks[:] = NOT_KNOWN

    def free(self, slot: int) -> None:
        """Take back a slot's blocks and its reservation."""
        for group in range(self.num_groups):
            self._let_go(group, self.table[group, slot, self.first[group, slot] : self.held[slot]])
        self.held[slot] = self.shared[slot] = 0
        self.first[:, slot] = self.reserved[:, slot] = 0
        if self.host is not None:
            self.host.left(slot)

    # -- using blocks again --------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes], before: Match | None = None) -> Match:
        """The longest known beginning of a sequence.

        Args:
            before: what was found of it earlier. Requests that wait are looked at again in each step, and little has changed.
        """
        before = before if before is not None and self._holds(before, len(hashes)) else Match()
        columns = self._known_columns(hashes, before.columns)
        if not columns:
            return Match()
        blocks = np.full((self.num_groups, columns), NOT_KNOWN, np.int32)
        if before.blocks is not None:
            blocks[:, : before.columns] = before.blocks
        restored = 0
        for group in range(self.num_groups):
            first = max(self._first_seen(group, columns), before.columns)
            found = [self._known.block((group, each)) for each in hashes[first:columns]]
            restored += found.count(NOT_KNOWN)
            blocks[group, first:] = found
        spared = [int((self._holders[row[row >= 0]] > 0).sum()) for row in blocks]
        revived = int((blocks >= 0).sum()) - sum(spared)
        kept = sum(spared[group] for group in self._whole)
        return Match(columns, hashes, blocks, self._known.since[blocks], revived, restored, kept)

    def _holds(self, match: Match, most: int) -> bool:
        """Whether columns found earlier need not be looked for again: each had a block, and all of these hold what they held."""
        if self._windowed or match.restored or match.columns > most or match.blocks is None:
            return False
        return bool((self._known.since[match.blocks] == match.since).all())

    def _first_seen(self, group: int, columns: int) -> int:
        """First column that a sequence which goes on behind `columns` sees."""
        sight = self.sights[group]
        return int(sight.lowest(np.array(columns * self.block_size))) // self.block_size if sight.reach else 0

    def _knows(self, group: int, each: bytes) -> bool:
        return (group, each) in self._known or (self.host is not None and (group, each) in self.host)

    def _known_columns(self, hashes: Sequence[bytes], begin: int) -> int:
        """Length of the longest beginning, `begin` columns or more, of which every group knows all that it will look at."""
        columns = min([len(hashes), *(self._known_from(begin, group, hashes) for group in self._whole)])
        while columns and (shorter := self._shorter(hashes, columns)) < columns:
            columns = shorter
        return columns

    def _known_from(self, begin: int, group: int, hashes: Sequence[bytes]) -> int:
        """Length of the longest beginning that a group knows. Of most it knows none, so that few of the hashes are asked for."""
        end, size = begin, 1
        while begin < len(hashes):
            begin, end, size = end, min(end + size, len(hashes)), 2 * size
            for column, each in enumerate(hashes[begin:end], start=begin):
                if not self._knows(group, each):
                    return column
        return len(hashes)

    def _shorter(self, hashes: Sequence[bytes], columns: int) -> int:
        """`columns`, if all groups know what is within their windows at its end; else a length that no longer one may have."""
        shorter = columns
        for group in self._windowed:
            seen = range(columns - 1, self._first_seen(group, columns) - 1, -1)
            gap = next((column for column in seen if not self._knows(group, hashes[column])), None)
            if gap is not None:
                ends = (length for length in range(gap, 0, -1) if self._may_end(group, hashes, length))
                shorter = min(next(ends, 0), shorter)
        return shorter

    def _may_end(self, group: int, hashes: Sequence[bytes], columns: int) -> bool:
        """Whether the last of so many columns is known to a group, or seen by nothing that comes behind."""
        return self._knows(group, hashes[columns - 1]) or self.sights[group].begins_at(columns * self.block_size)

    def attach(self, slot: int, match: Match) -> Grant:
        """Let an empty slot begin with what `match` found; what the host has is on its way into new blocks."""
        assert not self.held[slot], "a slot shares blocks only at its beginning"
        assert match.blocks is not None
        blocks = match.blocks.copy()
        found = blocks[blocks >= 0]
        for block in found.tolist():
            self._idle.pop(block, None)
        for group in range(self.num_groups):
            mine = blocks[group][blocks[group] >= 0]
            self._num_held[group] += int((self._holders[mine] == 0).sum())
            self._holders[mine] += 1
            self.first[group, slot] = self._first_seen(group, match.columns)
        self.held[slot] = self.shared[slot] = match.columns
        if match.restored:
            self._restore(match, blocks)
        self.table[:, slot, : match.columns] = blocks
        self.reused_total += found.size + match.restored
        if self.host is not None:
            self.host.attached(slot, blocks[blocks >= 0])
        groups, columns = np.nonzero(blocks >= 0)
        return Grant(groups * self.table.shape[1] + slot, columns, blocks[groups, columns])

    def _restore(self, match: Match, blocks: np.ndarray) -> None:
        """Begin to copy what `match` found on the host into blocks of the device, and enter them."""
        assert self.host is not None
        first = np.array([self._first_seen(group, match.columns) for group in range(self.num_groups)])
        groups, columns = np.nonzero((np.arange(match.columns) >= first[:, None]) & (blocks < 0))
        keys = [(group, match.hashes[column]) for group, column in zip(groups.tolist(), columns.tolist(), strict=True)]
        places = self.host.claim(keys)
        new = self._take(len(keys))
        self.host.restore(places, new)
        blocks[groups, columns] = new
        self._num_held += np.bincount(groups, minlength=self.num_groups)
        for key, block in zip(keys, new.tolist(), strict=True):
            self._known.enter(key, block)
        self.restored_total += len(keys)

    def fork(self, parent: int, child: int, num_columns: int) -> Grant:
        """Let an empty slot begin with the first columns of another; all of them are full."""
        assert not self.held[child], "a slot shares blocks only at its beginning"
        for group in range(self.num_groups):
            first = min(int(self.first[group, parent]), num_columns)
            blocks = self.table[group, parent, first:num_columns]
            self._holders[blocks] += 1
            self._forked[blocks] = True
            self.table[group, child, first:num_columns] = blocks
            self.first[group, child] = first
        self.held[child] = self.shared[child] = num_columns
        groups, columns = np.nonzero(self.table[:, child, :num_columns] != NOT_KNOWN)
        return Grant(groups * self.table.shape[1] + child, columns, self.table[groups, child, columns])

    def holds_what_is_seen(self, slot: int, num_columns: int) -> bool:
        """Whether a sequence that goes on behind the first columns of a slot would find all that it looks at."""
        return all(self.first[group, slot] <= self._first_seen(group, num_columns) for group in self._windowed)

    def held_alone(self, slots: Sequence[int]) -> int:
        """Columns' worth of blocks that would come free, at the least, if all of `slots` were freed."""
        held = [
            self.table[group, slot, self.first[group, slot] : self.held[slot]]
            for slot in slots
            for group in range(self.num_groups)
        ]
        if not held:
            return 0
        blocks, counts = np.unique(np.concatenate(held), return_counts=True)
        return int((self._holders[blocks] == counts).sum()) // self.num_groups

    def publish(self, slot: int, hashes: Sequence[bytes], first: int = 0) -> None:
        """Make a slot's columns `first`, `first + 1`, ... known by `hashes[first:]`: all their tokens have been read.

        Where two sequences read the same tokens at once, one block is known and the other stays its owner's own.
        """
        for group in range(self.num_groups):
            begin = max(first, int(self.first[group, slot]))
            blocks = self.table[group, slot, begin : len(hashes)]
            new = np.flatnonzero(self._known.since[blocks] == 0)  # of a long sequence most were published before
            for column, block in zip((begin + new).tolist(), blocks[new].tolist(), strict=True):
                key = group, hashes[column]
                if key not in self._known:
                    self._known.enter(key, block)

    def ready(self, slot: int) -> bool:
        """Whether all that a slot began with is on the device."""
        return self.host is None or self.host.ready(slot)

    def forget_all(self) -> None:
        """Make nothing known any more: the blocks that nobody holds become empty, and the host's as well."""
        host, self.host = self.host, None
        self._empty(len(self._idle))
        self.host = host
        self._known.forget_all()
        if host is not None:
            host.clear()

    def _copy_ahead(self, host: HostPool) -> None:
        """Let the host have those that are lost next, so that no step has to wait for that then."""
        if self._num_empty < AHEAD:
            some = itertools.islice(self._idle, AHEAD - self._num_empty)
            next_lost = [block for block in some if self._known.key(block) not in host]
            host.keep([self._known.key(block) for block in next_lost], next_lost, lost=False)

    @property
    def num_known(self) -> int:
        """Blocks that a new sequence could begin with."""
        return len(self._known)

    def check(self) -> None:
        """Raise AssertionError unless every block is empty, known and idle, or held by exactly those slots that count it."""
        check_blocks(self)
