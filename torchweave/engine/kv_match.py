"""By what blocks of the KV cache are known, what is found of a sequence's beginning, and what a sequence was given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NOT_KNOWN = -1


@dataclass(frozen=True)
class Match:
    """The longest beginning of a sequence that need not be computed.

    Attributes:
        columns: how long it is.
        hashes: of its columns.
        blocks: int32 `[groups, columns]`; NOT_KNOWN where no query will look, or where the host has it.
        revived: blocks on the device that nobody holds.
        restored: blocks that the host has.
        spared: blocks that somebody holds, of groups that keep all.
    """

    columns: int = 0
    hashes: tuple[bytes, ...] = ()
    blocks: np.ndarray | None = None
    revived: int = 0
    restored: int = 0
    spared: int = 0


@dataclass(frozen=True)
class Grant:
    """Blocks that were just given: entry i says that column `columns[i]` of row `slots[i]` of the block tables is `blocks[i]`.

    Group g's row of a slot is `g * max_slots + slot`.
    """

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
