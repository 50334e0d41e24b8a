"""By what blocks of the KV cache are known, what is found of a sequence's beginning, and what a sequence was given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

NO_BLOCK = -1
Key = tuple[int, bytes]
"""A group of layers, and the hash of a block's tokens and of all before them."""


@dataclass(frozen=True)
class PrefixHit:
    """The longest beginning of a sequence that need not be computed.

    Attributes:
        block_indices: how long it is.
        hashes: of its columns and maybe more.
        blocks: int32 `[groups, block_indices]`; NO_BLOCK where no query will look, or where the host has it.
        version: int64 of the same shape, `PrefixIndex.version` of these blocks: they hold what they held as long as it
        stays the same.
        unreferenced: blocks on the device that nobody holds.
        on_host: blocks that the host has.
        referenced: blocks that somebody holds, of groups that keep all.
    """

    block_indices: int = 0
    hashes: Sequence[bytes] = ()
    blocks: np.ndarray | None = None
    version: np.ndarray | None = None
    unreferenced: int = 0
    on_host: int = 0
    referenced: int = 0


@dataclass(frozen=True)
class BlockGrant:
    """Blocks that were just given: entry i says that column `block_indices[i]` of row `slots[i]` of the block tables
    is `blocks[i]`.

    Group g's row of a slot is `g * max_slots + slot`.
    """

    slots: np.ndarray
    block_indices: np.ndarray
    blocks: np.ndarray


class PrefixIndex:
    """Blocks on the device by what they hold.

    Attributes:
        version: int64 `[blocks]`; counts from 1 in the order in which they became known, 0 for those that are not.
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
        """The block that holds it, or NO_BLOCK."""
        return self._block_of.get(key, NO_BLOCK)

    def key(self, block: int) -> Key:
        """What a known block holds."""
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
    """One hash for each full block of a sequence, over the block's tokens and the hash before it, computed when it is looked at.

    Most prompts begin like no other, which the first of thousands of hashes says: the rest is computed as the prompt is read, a
    step's part in each step, and not while all who generate wait for it.

    Args:
        tokens: int32, from the sequence's first token on.
        salt: sequences with different salts share nothing.
        computed: hashes of the first blocks, whichever part of the sequence they were computed for; new ones are added.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, salt: str, computed: list[bytes]) -> None:
        self._tokens = np.ascontiguousarray(tokens, np.int32)
        self._block_size = block_size
        self._salt = salt
        self._computed = computed
        self._count = len(self._tokens) // block_size

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            if wanted := range(self._count)[index]:
                self._compute(max(wanted[0], wanted[-1]) + 1)
            return self._computed[: self._count][index]
        if not 0 <= index < self._count:
            raise IndexError(index)
        self._compute(index + 1)
        return self._computed[index]

    def _compute(self, count: int) -> None:
        """See to it that the first `count` hashes are known."""
        computed, size = self._computed, self._block_size
        if len(computed) >= count:
            return
        last = computed[-1] if computed else hashlib.blake2b(self._salt.encode(), digest_size=16).digest()
        content = self._tokens[len(computed) * size : count * size].tobytes()
        width = size * self._tokens.itemsize
        for start in range(0, len(content), width):
            last = hashlib.blake2b(last + content[start : start + width], digest_size=16).digest()
            computed.append(last)
