"""Sampling on the device: greedy, or temperature with top-nσ, top-k, top-p and min-p, by the parameters of each row's slot.

The filters apply in this order, all after temperature: keep the tokens whose logit is at least max - top_n_sigma * σ; of these the
top_k most likely; of these the smallest set of most likely tokens whose renormalized probability reaches top_p; of these the tokens
with at least min_p times the largest probability. A token tied with the last kept token is kept.

σ is the standard deviation of the row's logits, as of a population, but for those that a mask or a bad word excludes (Tang et al.,
"Top-nσ: Not All Logits Are You Need", arXiv 2411.07641). It grows as the logits do, so the temperature changes nothing here.

The rest is sampled by Gumbel-max with noise keyed by (seed, position, vocabulary index), so a request's tokens do not depend on its
batch. While the sampled token's position is below min_position, stop ids have logit -inf.

Random numbers are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A token's noise
depends on (seed, position, vocabulary index) only. One Philox call gives four words, shared by four vocabulary indices that lie
`LANES` apart, so that a vector machine computes each call once and needs no shuffle:

    counter = (v // (4 * LANES) * LANES + v % LANES, position, 0, 0)     word = v // LANES % 4     key = (seed_lo, seed_hi)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import BAD_WORD_LOGIT, INVALID_TOKEN, LANES
from torchweave.ops.slot_state import SlotState

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

    Small u, whose noise is large, keep all 32 bits by the series of -log(1 - u); elsewhere 24 bits make 1 - u exact in float32.
    The kernel computes the same, so it differs by the rounding of `log` only.
    """
    u = ((words & np.uint64(_SERIES_BELOW - 1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    series = u * (np.float32(1) + u * (np.float32(0.5) + u * np.float32(1 / 3)))
    complement = (np.uint64(1 << 24) - (words >> np.uint64(8))).astype(np.float32) * np.float32(2.0**-24)
    return -np.log(np.where(words < _SERIES_BELOW, series, -np.log(complement)))


GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: their reciprocal overflows."""


def sample(logits: Tensor, slots: Tensor, state: SlotState, out: Tensor | None = None) -> Tensor:
    """Sample one token for each row. logits [N, V] float32, bfloat16 or float16; slots int32 [N] (-1 = padding: 0, unused).

    Returns `out`, int32 [N]: `INVALID_TOKEN` for a row whose largest logit is not finite. Greedy takes the first index on ties,
    like torch.argmax. Fit for CUDA graphs; V < 2**31.
    """
    assert logits.dim() == 2 and logits.shape[0] == slots.numel(), (logits.shape, slots.shape)
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device) if out is None else out
    if state.device.type == "cuda":
        from torchweave.ops.kernels.sampling.sample import launch_sample

        launch_sample(logits, slots, state, out, GREEDY_BELOW)
    else:
        out.copy_(sample_reference(logits, slots, state))
    return out


def sample_reference(logits: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    """`sample` on the CPU, vectorised over rows; `state` is a CPU state. Returns int64 [N]."""
    rows, host_arrays = slots.numpy(), state.host_arrays
    real = rows >= 0
    positions = host_arrays["position"][rows] + 1
    stop_masked = real & (positions < host_arrays["min_position"][rows])
    if stop_masked.any():
        logits = _without_stop_ids(logits, stop_masked, host_arrays["stop_ids"][rows])
    tokens = logits.argmax(dim=-1)  # of the first NaN if there is one
    invalid = ~logits.gather(1, tokens[:, None])[:, 0].isfinite() & torch.from_numpy(real)
    tokens *= torch.from_numpy(real)
    random_rows = np.flatnonzero(real & (host_arrays["temperature"][rows] >= GREEDY_BELOW))
    if random_rows.size:
        picked = torch.from_numpy(random_rows)
        tokens[picked] = _draw(logits[picked].float(), rows[random_rows], positions[random_rows], state)
    return tokens.masked_fill_(invalid, INVALID_TOKEN)


def _without_stop_ids(logits: Tensor, stop_masked: np.ndarray, stop_ids: np.ndarray) -> Tensor:
    row, column = np.nonzero(stop_masked[:, None] & (stop_ids >= 0) & (stop_ids < logits.shape[1]))
    logits = logits.clone()
    logits[torch.from_numpy(row), torch.from_numpy(stop_ids[row, column]).long()] = -torch.inf
    return logits


def _draw(logits: Tensor, slots: np.ndarray, positions: np.ndarray, state: SlotState) -> Tensor:
    """Gumbel-max over the kept tokens of logits float32 [M, V], for rows with a temperature."""
    host_arrays = state.host_arrays
    inverse = torch.from_numpy(np.float32(1) / host_arrays["temperature"][slots])
    names = ("top_k", "top_p", "min_p", "top_n_sigma")
    filtered = filter_logits(logits, inverse, *(torch.from_numpy(host_arrays[name][slots]) for name in names))
    noise = gumbel(
        random_words(host_arrays["seed_lo"][slots], host_arrays["seed_hi"][slots], positions, logits.shape[1])
    )
    return (filtered * inverse[:, None] + torch.from_numpy(noise)).argmax(dim=-1)


def filter_logits(
    logits: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, top_n_sigma: Tensor
) -> Tensor:
    """logits float32 [M, V] with -inf for every token that the filters (each [M]) drop."""
    vocab_size = logits.shape[1]
    limited = (top_k > 0) & (top_k < vocab_size)
    nucleus = top_p < 1
    largest = logits.amax(dim=-1, keepdim=True)
    cutoff = torch.full_like(largest, -torch.inf)
    if bool((top_n_sigma > 0).any()):
        lowest = largest - top_n_sigma[:, None] * _deviation(logits)
        cutoff = torch.where(top_n_sigma[:, None] > 0, lowest, cutoff)
    if bool((limited | nucleus).any()):
        ordered = logits.sort(dim=-1, descending=True).values
        kth = ordered.gather(1, (top_k.long().clamp(1, vocab_size) - 1)[:, None])
        cutoff = torch.where(limited[:, None], torch.maximum(kth, cutoff), cutoff)
        if bool(nucleus.any()):
            mass = ((ordered - largest) * inverse_temperature[:, None]).exp().double()
            mass = mass.masked_fill(ordered < cutoff, 0).cumsum(dim=-1)
            needed = top_p[:, None].double() * mass[:, -1:]
            last = (mass < needed).sum(dim=-1, keepdim=True).clamp(max=vocab_size - 1)
            edge = torch.where(nucleus[:, None], ordered.gather(1, last), cutoff)
            cutoff = torch.maximum(cutoff, edge)
    dropped = (logits < cutoff) | ((logits - largest) * inverse_temperature[:, None] < min_p.log()[:, None])
    return logits.masked_fill(dropped, -torch.inf)


def _deviation(logits: Tensor) -> Tensor:
    """Standard deviation float32 [M, 1] of each row's logits that are not excluded; infinity if there are none."""
    allowed, values = logits > BAD_WORD_LOGIT, logits.double()
    count = allowed.sum(dim=-1, keepdim=True)
    mean = values.where(allowed, 0.0).sum(dim=-1, keepdim=True) / count
    variance = (values - mean).square().where(allowed, 0.0).sum(dim=-1, keepdim=True) / count
    return variance.sqrt().masked_fill(count == 0, torch.inf).float()


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities under the raw logits (no temperature, no filters), in float32.

    logits [N, V], tokens [N] -> (of the tokens [N], the `top` largest [N, top], their ids int64 [N, top], rank of the token
    int64 [N], 1 = the most likely; tied tokens share the better rank). Runs after the graph, on the rows that request it.
    """
    values = logits.float().log_softmax(dim=-1)
    chosen = values.gather(1, tokens.long().clamp(min=0)[:, None])  # may be INVALID_TOKEN
    best, ids = values.topk(min(top, values.shape[1]), dim=-1)
    rank = (values > chosen).sum(dim=-1) + 1
    return chosen[:, 0], best, ids, rank
