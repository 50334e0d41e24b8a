"""Prefix index: block hashes, prefix lookup results, and the blocks granted to a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

NO_BLOCK = -1
_NO_KEYS: Mapping[int, bytes] = {}
Key = tuple[int, bytes]
"""A group of layers, and the hash of a block's tokens and of all tokens before them."""


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix of a sequence.

    Attributes:
        num_blocks: its length in logical blocks.
        hashes: hashes of these blocks, maybe followed by more.
        blocks: int32 `[groups, num_blocks]`; NO_BLOCK for blocks outside the window and for blocks in host memory.
        version: int64 of the same shape, `PrefixIndex.version` of the blocks; a block is unchanged while it is the same.
        unreferenced: number of unreferenced blocks on the device.
        on_host: number of blocks in host memory.
        referenced: number of referenced blocks, in groups without a window.
        longest: the cached prefix without regard to recurrent states, of which this one is a part; None for models without.
    """

    num_blocks: int = 0
    hashes: Sequence[bytes] = ()
    blocks: np.ndarray | None = None
    version: np.ndarray | None = None
    unreferenced: int = 0
    on_host: int = 0
    referenced: int = 0
    longest: PrefixHit | None = None


NO_HIT = PrefixHit()


@dataclass(frozen=True)
class BlockGrant:
    """New entries of the block tables: row `slots[i]` has `blocks[i]` at index `block_indices[i]`.

    The row of a slot in group g is `g * max_slots + slot`.
    """

    slots: np.ndarray
    block_indices: np.ndarray
    blocks: np.ndarray


class PrefixIndex:
    """Blocks on the device by hash.

    Attributes:
        version: int64 `[blocks]`, position from 1 in the order of insertion; 0 for blocks that are not in the index.
    """

    def __init__(self, num_blocks: int) -> None:
        self.version = np.zeros(num_blocks, np.int64)
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._num_inserted = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._block_of

    def block(self, key: Key) -> int:
        """The block with this key, or NO_BLOCK."""
        return self._block_of.get(key, NO_BLOCK)

    def key(self, block: int) -> Key:
        """The key of a block in the index."""
        return self._key_of[block]

    def insert(self, key: Key, block: int) -> None:
        self._num_inserted += 1
        self.version[block] = self._num_inserted
        self._block_of[key] = block
        self._key_of[block] = key

    def remove(self, block: int) -> None:
        self.version[block] = 0
        del self._block_of[self._key_of.pop(block)]

    def reset(self) -> None:
        for block in list(self._key_of):
            self.remove(block)

    def items(self) -> Iterable[tuple[Key, int]]:
        return self._block_of.items()


class BlockHashes(Sequence[bytes]):
    """One hash per full block of a sequence, over the block's tokens and the hash before it, computed on access.

    Most prompts have no cached prefix, as the first of thousands of hashes shows: the others are computed step by step during
    the prefill, so that decode requests do not wait for them.

    Args:
        tokens: int32, from the sequence's first token on.
        salt: sequences with different salts share no blocks.
        computed: hashes of the leading blocks computed so far for this sequence; new ones are appended.
        block_keys: what the hash of a block includes beside its tokens, by block: images, whose tokens are all equal.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        salt: str,
        computed: list[bytes],
        block_keys: Mapping[int, bytes] = _NO_KEYS,
    ) -> None:
        self._tokens = np.ascontiguousarray(tokens, np.int32)
        self._block_size = block_size
        self._salt = salt
        self._computed = computed
        self._block_keys = block_keys
        self._count = len(self._tokens) // block_size

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            if indices := range(self._count)[index]:
                self._compute(max(indices[0], indices[-1]) + 1)
            return self._computed[: self._count][index]
        if not 0 <= index < self._count:
            raise IndexError(index)
        self._compute(index + 1)
        return self._computed[index]

    def _compute(self, count: int) -> None:
        """Extend `computed` to at least `count` hashes."""
        computed, size = self._computed, self._block_size
        if len(computed) >= count:
            return
        last = computed[-1] if computed else hashlib.blake2b(self._salt.encode(), digest_size=16).digest()
        content = self._tokens[len(computed) * size : count * size].tobytes()
        width = size * self._tokens.itemsize
        for start in range(0, len(content), width):
            key = self._block_keys.get(len(computed), b"") if self._block_keys else b""
            last = hashlib.blake2b(last + content[start : start + width] + key, digest_size=16).digest()
            computed.append(last)
