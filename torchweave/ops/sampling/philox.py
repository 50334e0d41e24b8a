"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in numpy, and the noise of sampling.

A token's noise depends on (seed, position, vocabulary index) alone. One Philox call gives four words, shared by four vocabulary
indices that lie `LANES` apart, so that a vector machine computes each call once and needs no shuffle:

    counter = (v // (4 * LANES) * LANES + v % LANES, position, 0, 0)     word = v // LANES % 4     key = (seed_lo, seed_hi)
"""

from __future__ import annotations

import numpy as np

from torchweave.ops.kernels.sampling.layout import LANES

_MASK = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_SERIES_BELOW = 1 << 23


def philox_4x32(
    counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], key: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four uint64 arrays of 32-bit words from counter and key arrays (uint64 below 2**32) that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    shift = np.uint64(32)
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & _MASK, (a >> shift) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seed_lo: np.ndarray, seed_hi: np.ndarray, position: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint64 [M, V]: the 32-bit word of each vocabulary index, for M rows with int32 [M] seeds and positions."""
    tiles, lanes = -(-vocab_size // (4 * LANES)), min(LANES, vocab_size)
    index = (np.arange(tiles, dtype=np.uint64)[:, None] * np.uint64(LANES) + np.arange(lanes, dtype=np.uint64)).reshape(
        1, -1
    )
    row = [np.ascontiguousarray(a).view(np.uint32).astype(np.uint64)[:, None] for a in (position, seed_lo, seed_hi)]
    zero = np.zeros((1, 1), np.uint64)
    words = philox_4x32((index, row[0], zero, zero), (row[1], row[2]))
    if vocab_size <= LANES:
        return words[0]
    stacked = np.stack([word.reshape(-1, tiles, lanes) for word in words], axis=2)
    return stacked.reshape(len(position), -1)[:, :vocab_size]


def gumbel(words: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise float32 from 32-bit words: -log(-log(1 - u)) for u = word / 2**32.

    Small u, whose noise is large, keep all 32 bits by the series of -log(1 - u); elsewhere 24 bits make 1 - u exact in float32. So
    the kernel, which does the same, differs from this by the rounding of `log` only.
    """
    u = ((words & np.uint64(_SERIES_BELOW - 1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    series = u * (np.float32(1) + u * (np.float32(0.5) + u * np.float32(1 / 3)))
    complement = (np.uint64(1 << 24) - (words >> np.uint64(8))).astype(np.float32) * np.float32(2.0**-24)
    return -np.log(np.where(words < _SERIES_BELOW, series, -np.log(complement)))
