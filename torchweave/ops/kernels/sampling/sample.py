"""Triton kernels of sampling: a pass over chunks of every row, then one program per row that selects the token.

    partial   (rows x chunks of 4096)   greedy rows and rows with temperature only: the best token of the chunk, and no other work.
                                        Filtered rows: the chunk's mass, and the largest logit of each 256 tokens (a "sub").
    finish    (rows)                    joins the chunks' bests; or, for filtered rows, finds the cutoff and samples.

Every filter keeps the tokens whose logit reaches a cutoff. Logits are compared as `keys`: int32 in the order of the floats, so
that the cutoff is found exactly, one bit of the key at a time. To search few tokens instead of the row, `finish` first takes a
bound from the subs: at least k tokens reach the k-th largest sub maximum, and few more do. The tokens that reach the bound, the
candidates, go to a list if they fit; if they are certain to include all kept tokens, the search runs on them, else on the row.
Top-nσ is such a bound itself, known before the search: `partial` adds count, mean and squared deviations of each chunk's logits.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import BAD_WORD_LOGIT, INVALID_TOKEN, LANES, MAX_STOP_IDS, SlotTensors
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2
from torchweave.ops.slot_fields import INDEX

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)  # NaN of kernels lies above
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)
_INVALID_TOKEN = tl.constexpr(INVALID_TOKEN)
_LANES = tl.constexpr(LANES)
_STOPS = tl.constexpr(MAX_STOP_IDS)
_BAD_WORD_LOGIT = tl.constexpr(BAD_WORD_LOGIT)
_POSITION, _MIN_POSITION, _SEED_LO, _SEED_HI, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _TOP_N_SIGMA = (
    tl.constexpr(INDEX[name])
    for name in (
        "position", "min_position", "seed_lo", "seed_hi", "temperature", "top_k", "top_p", "min_p", "top_n_sigma",
    )
)  # fmt: skip
_CHUNK = 4096
_SUB = 256
_CAPACITY = 2048  # largest number of candidates searched in registers
_SUBS_AT_ONCE = 32
_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a key that follow from the others


@triton.jit
def philox(counter, position, seed_lo, seed_hi):
    """`torchweave.ops.sampling.sample.philox_4x32` on (counter, position, 0, 0): the same words."""
    c0 = counter.to(tl.uint32)
    c1 = (counter * 0 + position).to(tl.uint32)
    c2 = (counter * 0).to(tl.uint32)
    c3 = c2
    k0 = c2 + seed_lo.to(tl.uint32, bitcast=True)
    k1 = c2 + seed_hi.to(tl.uint32, bitcast=True)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1)


@triton.jit
def gumbel(word):
    """`torchweave.ops.sampling.sample.gumbel`, up to the rounding of `log`."""
    u = ((word & 0x7FFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * 0.3333333432674408))
    complement = (16777216 - (word >> 8).to(tl.int32)).to(tl.float32) * 5.960464477539063e-08
    return -tl.log(tl.where(word < 0x800000, series, -tl.log(complement)))


@triton.jit
def _flip(bits):
    """Float bits <-> int32 key in the order of the floats (NaN on top); its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(value):
    return _flip(tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True))  # -0.0 ties with 0.0


@triton.jit
def _value(key):
    return _flip(key).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_logits, stop_ids, stop_masked, index, inside):
    """Logits at `index` as float32; -inf outside, and at stop ids of a row below min_position."""
    value = tl.load(row_logits + index, mask=inside, other=float("-inf")).to(tl.float32)
    if stop_masked:
        for i in range(_STOPS):
            value = tl.where(index == tl.load(stop_ids + i), float("-inf"), value)
    return value


@triton.jit
def _load_keys(row_logits, stop_ids, stop_masked, index, inside):
    return tl.where(inside, _key(_load(row_logits, stop_ids, stop_masked, index, inside)), INT_MIN)


@triton.jit
def _passes_filters(key, value, cutoff, largest, inverse_temperature, log_min_p):
    return (key >= cutoff) & ((value - largest) * inverse_temperature >= log_min_p)


@triton.jit
def _draw_tile(
    row_logits, stop_ids, stop_masked, first, vocab_size, inverse_temperature, seed_lo, seed_hi, position,
    cutoff, largest, log_min_p, best, best_index, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Fold the 4 * COUNTERS tokens from `first` into (best score key, its index), each [COUNTERS]."""
    lane = tl.arange(0, COUNTERS)
    w0, w1, w2, w3 = philox(first // 4 + lane, position, seed_lo, seed_hi)
    start = first + lane // _LANES * (4 * _LANES) + lane % _LANES
    for i in tl.static_range(4):
        index = start + i * _LANES
        inside = index < vocab_size
        value = _load(row_logits, stop_ids, stop_masked, index, inside)
        word = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
        score = _key(value * inverse_temperature + gumbel(word))
        passes = inside & _passes_filters(_key(value), value, cutoff, largest, inverse_temperature, log_min_p)
        score = tl.where(passes, score, INT_MIN)
        better = (score > best) | ((score == best) & (index < best_index))
        best = tl.where(better, score, best)
        best_index = tl.where(better, index, best_index)
    return best, best_index


@triton.jit
def _first_best(key, index):
    best = tl.max(key, axis=0)
    return best, tl.min(tl.where(key == best, index, INT_MAX), axis=0)


@triton.jit
def _search(key, weight, floor, target, KEY_SHIFT: tl.constexpr):
    """The largest cutoff whose tokens (key >= max(cutoff, floor)) weigh at least `target`; INT_MIN if there is none."""
    cutoff = tl.full((), INT_MIN, tl.int32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32 - KEY_SHIFT):
        trial = cutoff ^ bit.to(tl.int32, bitcast=True)  # INT_MIN is the sign bit only: clear it, then set lower bits
        reaches_target = tl.sum(tl.where(key >= tl.maximum(trial, floor), weight, 0), axis=0) >= target
        cutoff = tl.where(reaches_target, trial, cutoff)
        bit = bit >> 1
    return cutoff


@triton.jit
def _fixed_mass(key, largest, inverse_temperature):
    """Mass of each token relative to the largest in units of 2**-40: its sums do not depend on the order of the candidates."""
    mass = tl.exp((_value(key) - largest) * inverse_temperature) * 1099511627776.0
    return tl.where(key > INT_MIN, mass, 0.0).to(tl.int64)


@triton.jit
def _row_weight(
    row_logits,
    stop_ids,
    stop_masked,
    vocab_size,
    bound,
    largest,
    inverse_temperature,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count, or mass relative to the largest, of the row's tokens with key >= bound."""
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        index = first + tl.arange(0, TILE)
        inside = index < vocab_size
        value = _load(row_logits, stop_ids, stop_masked, index, inside)
        weight = tl.exp((value - largest) * inverse_temperature) if BY_MASS else tl.full([TILE], 1.0, tl.float32)
        total += tl.where(inside & (_key(value) >= bound), weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _row_search(
    row_logits, stop_ids, stop_masked, vocab_size, floor, target, largest, inverse_temperature,
    BY_MASS: tl.constexpr, KEY_SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`_search` over the row in memory: one pass a bit."""
    cutoff = tl.full((), INT_MIN, tl.int32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32 - KEY_SHIFT):
        trial = cutoff ^ bit.to(tl.int32, bitcast=True)
        bound = tl.maximum(trial, floor)
        weight = _row_weight(
            row_logits, stop_ids, stop_masked, vocab_size, bound, largest, inverse_temperature, BY_MASS, TILE
        )
        cutoff = tl.where(weight >= target, trial, cutoff)
        bit = bit >> 1
    return cutoff


@triton.jit
def _field(fields, stride, slot, FIELD: tl.constexpr):
    """An int32 field of a slot."""
    return tl.load(fields + FIELD * stride + slot)


@triton.jit
def _float_field(fields, stride, slot, FIELD: tl.constexpr):
    return _field(fields, stride, slot, FIELD).to(tl.float32, bitcast=True)


@triton.jit
def _row_parameters(fields, stride, slot, vocab_size):
    """(temperature, top_k or vocab_size, top_p, min_p, top_n_sigma, the sampled token's position, whether stop ids are masked)."""
    k = _field(fields, stride, slot, _TOP_K)
    k = tl.where((k <= 0) | (k > vocab_size), vocab_size, k)
    at = _field(fields, stride, slot, _POSITION) + 1
    stop_masked = at < _field(fields, stride, slot, _MIN_POSITION)
    p, m = _float_field(fields, stride, slot, _TOP_P), _float_field(fields, stride, slot, _MIN_P)
    n = _float_field(fields, stride, slot, _TOP_N_SIGMA)
    return _float_field(fields, stride, slot, _TEMPERATURE), k, p, m, n, at, stop_masked


@triton.jit
def _store_moments(value, into):
    """Count, mean and sum of squared deviations of a chunk's logits [SUBS, SUB] that no mask and no bad word excludes."""
    allowed = value > _BAD_WORD_LOGIT
    count = tl.sum(tl.sum(allowed.to(tl.float32), axis=1), axis=0)
    mean = tl.sum(tl.sum(tl.where(allowed, value, 0.0), axis=1), axis=0) / tl.maximum(count, 1.0)
    deviation = tl.where(allowed, value - mean, 0.0)
    tl.store(into, count)
    tl.store(into + 1, mean)
    tl.store(into + 2, tl.sum(tl.sum(deviation * deviation, axis=1), axis=0))


@triton.jit
def _deviation(moments, chunk, num_chunks):
    """Standard deviation of a row's logits, from the moments of its chunks; infinity if all are excluded."""
    inside = chunk < num_chunks
    count = tl.load(moments + chunk * 3, mask=inside, other=0.0)
    mean = tl.load(moments + chunk * 3 + 1, mask=inside, other=0.0)
    squares = tl.load(moments + chunk * 3 + 2, mask=inside, other=0.0)
    total = tl.sum(count, axis=0)
    offset = mean - tl.sum(count * mean, axis=0) / tl.maximum(total, 1.0)
    variance = tl.sum(squares + count * offset * offset, axis=0) / tl.maximum(total, 1.0)
    return tl.where(total > 0.0, tl.sqrt_rn(variance), float("inf"))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def partial_kernel(
    logits, row_stride, slots, fields, field_stride, stop_ids,
    partial_key, partial_other, sub_key, counters, moments, vocab_size, num_chunks,
    GREEDY_BELOW: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """partial_key[row, chunk]: key of the best score or the largest logit; partial_other: its index, or the mass as float bits."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:  # a mixed step is padded to many rows
        return
    t, k, p, m, n, at, stop_masked = _row_parameters(fields, field_stride, slot, vocab_size)
    row_logits = logits + row.to(tl.int64) * row_stride
    row_stops = stop_ids + slot * _STOPS
    first = chunk * CHUNK
    into = row * num_chunks + chunk
    if t < GREEDY_BELOW:
        index = first + tl.arange(0, CHUNK)
        best, best_index = _first_best(_load_keys(row_logits, row_stops, stop_masked, index, index < vocab_size), index)
        tl.store(partial_key + into, best)
        tl.store(partial_other + into, best_index)
    else:
        inverse = tl.div_rn(1.0, t)
        if (k == vocab_size) & (p >= 1.0) & (m <= 0.0) & (n <= 0.0):
            none = tl.full([CHUNK // 4], INT_MIN, tl.int32)
            score, scored = _draw_tile(
                row_logits, row_stops, stop_masked, first, vocab_size, inverse,
                _field(fields, field_stride, slot, _SEED_LO), _field(fields, field_stride, slot, _SEED_HI), at,
                INT_MIN, 0.0, float("-inf"), none, none ^ INT_MIN ^ INT_MAX, CHUNK // 4,
            )  # fmt: skip
            winner, winner_index = _first_best(score, scored)
            tl.store(partial_key + into, winner)
            tl.store(partial_other + into, winner_index)
        else:
            if chunk == 0:
                tl.store(counters + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
            token = first + tl.arange(0, CHUNK // SUB)[:, None] * SUB + tl.arange(0, SUB)[None, :]
            inside = token < vocab_size
            value = _load(row_logits, row_stops, stop_masked, token, inside)
            subs = tl.max(tl.where(inside, _key(value), INT_MIN), axis=1)
            top = tl.max(subs, axis=0)
            mass = tl.where(inside, tl.exp((value - _value(top)) * inverse), 0.0)
            tl.store(partial_key + into, top)
            tl.store(partial_other + into, tl.sum(tl.sum(mass, axis=1), axis=0).to(tl.int32, bitcast=True))
            tl.store(sub_key + into * (CHUNK // SUB) + tl.arange(0, CHUNK // SUB), subs)
            if n > 0.0:
                _store_moments(value, moments + into * 3)


@triton.jit
def _collect(
    row_logits, stop_ids, stop_masked, vocab_size, key, bound, sub_list, candidate_key, candidate_index, counters,
    SUBS: tl.constexpr, SUB: tl.constexpr, CAPACITY: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """List the tokens with key >= bound, of the subs whose maximum `key` [SUBS] reaches it, in any order. Returns how many."""
    sub = tl.arange(0, SUBS)
    ordinal = tl.atomic_add(counters + tl.zeros_like(sub), 1, mask=key >= bound)
    tl.store(sub_list + ordinal, sub, mask=key >= bound)
    num_subs = tl.sum((key >= bound).to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads of this program read the list
    for first in range(0, num_subs, AT_ONCE):
        which = first + tl.arange(0, AT_ONCE)
        chosen = tl.load(sub_list + which, mask=which < num_subs, other=0)
        index = chosen[:, None] * SUB + tl.arange(0, SUB)[None, :]
        inside = (which < num_subs)[:, None] & (index < vocab_size)
        token_key = _load_keys(row_logits, stop_ids, stop_masked, index, inside)
        hit = inside & (token_key >= bound)
        place = tl.atomic_add(counters + 1 + tl.zeros_like(index), 1, mask=hit)
        hit &= place < CAPACITY
        tl.store(candidate_key + place, token_key, mask=hit)
        tl.store(candidate_index + place, index, mask=hit)
    tl.debug_barrier()
    return tl.load(counters + 1, volatile=True)  # bypass cache lines that a neighboring row's program read


@triton.jit
def _draw_candidates(
    key,
    index,
    k,
    p,
    whole_mass,
    floor,
    largest,
    inverse,
    log_min_p,
    seed_lo,
    seed_hi,
    at,
    vocab_size,
    KEY_SHIFT: tl.constexpr,
):
    """Token sampled from the candidates, which include all kept tokens. floor: the least key of kept tokens, INT_MIN if unknown;
    whole_mass: of the row, used without it and without top_k."""
    value = _value(key)
    inside = key > INT_MIN
    cutoff = floor
    if k < vocab_size:
        cutoff = tl.maximum(floor, _search(key, tl.where(inside, 1.0, 0.0), floor, k.to(tl.float32), KEY_SHIFT))
    if p < 1.0:
        weight = _fixed_mass(key, largest, inverse)
        mass = tl.sum(tl.where(key >= cutoff, weight, 0), axis=0).to(tl.float64)
        is_limited = (k < vocab_size) | (floor > INT_MIN)
        mass = tl.where(is_limited, mass, whole_mass.to(tl.float64) * 1099511627776.0)
        cutoff = tl.maximum(cutoff, _search(key, weight, cutoff, (p * mass).to(tl.int64), KEY_SHIFT))
    cutoff = tl.minimum(cutoff, _key(largest))
    w0, w1, w2, w3 = philox(index // (4 * _LANES) * _LANES + index % _LANES, at, seed_lo, seed_hi)
    ordinal = index // _LANES % 4
    word = tl.where(ordinal == 0, w0, tl.where(ordinal == 1, w1, tl.where(ordinal == 2, w2, w3)))
    score = _key(value * inverse + gumbel(word))
    score = tl.where(inside & _passes_filters(key, value, cutoff, largest, inverse, log_min_p), score, INT_MIN)
    return _first_best(score, index)[1]


@triton.jit
def _draw_row(
    row_logits, stop_ids, stop_masked, k, p, whole_mass, floor, largest, inverse, log_min_p, seed_lo, seed_hi, at, vocab_size,
    KEY_SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Token sampled from the row, read once a bit: for flat distributions and very large top_k. floor: see `_draw_candidates`."""
    cutoff = floor
    if k < vocab_size:
        cutoff = _row_search(
            row_logits,
            stop_ids,
            stop_masked,
            vocab_size,
            floor,
            k.to(tl.float32),
            largest,
            inverse,
            False,
            KEY_SHIFT,
            TILE,
        )
        cutoff = tl.maximum(floor, cutoff)
    if p < 1.0:
        mass = whole_mass
        if (k < vocab_size) | (floor > INT_MIN):
            mass = _row_weight(row_logits, stop_ids, stop_masked, vocab_size, cutoff, largest, inverse, True, TILE)
        edge = _row_search(
            row_logits, stop_ids, stop_masked, vocab_size, cutoff, p * mass, largest, inverse, True, KEY_SHIFT, TILE
        )
        cutoff = tl.maximum(cutoff, edge)
    cutoff = tl.minimum(cutoff, _key(largest))
    score = tl.full([TILE // 4], INT_MIN, tl.int32)
    index = tl.full([TILE // 4], INT_MAX, tl.int32)
    for first in range(0, vocab_size, TILE):
        score, index = _draw_tile(
            row_logits, stop_ids, stop_masked, first, vocab_size, inverse, seed_lo, seed_hi, at,
            cutoff, largest, log_min_p, score, index, TILE // 4,
        )  # fmt: skip
    return _first_best(score, index)[1]


@triton.jit(do_not_specialize_on_alignment=["slots", "out"])
def finish_kernel(
    logits, row_stride, slots, fields, field_stride, stop_ids,
    partial_key, partial_other, sub_key, counters, moments, sub_list, candidate_key, candidate_index, out, vocab_size, num_chunks,
    GREEDY_BELOW: tl.constexpr, CHUNKS: tl.constexpr, SUBS: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr, AT_ONCE: tl.constexpr, KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(out + row, 0)
        return
    t, k, p, m, n, at, stop_masked = _row_parameters(fields, field_stride, slot, vocab_size)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(partial_key + row * num_chunks + chunk, mask=chunk < num_chunks, other=INT_MIN)
    other = tl.load(partial_other + row * num_chunks + chunk, mask=chunk < num_chunks, other=INT_MAX)
    top = tl.max(best, axis=0)
    is_valid = (top > MINUS_INFINITY_KEY) & (top < INFINITY_KEY)
    if (t < GREEDY_BELOW) | ((k == vocab_size) & (p >= 1.0) & (m <= 0.0) & (n <= 0.0)):
        _, token = _first_best(best, other)
        tl.store(out + row, tl.where(is_valid, token, _INVALID_TOKEN))
    else:
        row_logits = logits + row.to(tl.int64) * row_stride
        row_stops = stop_ids + slot * _STOPS
        lo, hi = _field(fields, field_stride, slot, _SEED_LO), _field(fields, field_stride, slot, _SEED_HI)
        inverse = tl.div_rn(1.0, t)
        log_min_p = tl.log(m)
        largest = _value(top)
        mass = tl.where(
            chunk < num_chunks, other.to(tl.float32, bitcast=True) * tl.exp((_value(best) - largest) * inverse), 0.0
        )
        whole_mass = tl.sum(tl.where(best > INT_MIN, mass, 0.0), axis=0)

        sub = tl.arange(0, SUBS)
        num_subs = tl.cdiv(vocab_size, SUB)
        row_subs = sub_key + row * num_chunks * (TILE // SUB)
        sub_max = tl.load(row_subs + sub, mask=sub < num_subs, other=INT_MIN)
        row_fits = vocab_size <= CAPACITY
        by_k = k <= num_subs
        rank = tl.where(by_k, k, (num_subs + 1) // 2)
        bound = INT_MIN + 1
        if not row_fits:
            bound = tl.maximum(
                _search(sub_max, tl.where(sub < num_subs, 1.0, 0.0), INT_MIN, rank.to(tl.float32), KEY_SHIFT), bound
            )
        floor = tl.full((), INT_MIN, tl.int32)
        if n > 0.0:  # all kept tokens reach it, and with top_k the bound too
            floor = _key(largest - n * _deviation(moments + row * num_chunks * 3, chunk, num_chunks))
            bound = tl.where(by_k, tl.maximum(bound, floor), floor)
        num_candidates = _collect(
            row_logits, row_stops, stop_masked, vocab_size, sub_max, bound, sub_list + row * SUBS, candidate_key + row * CAPACITY,
            candidate_index + row * CAPACITY, counters + row * 2, SUBS, SUB, CAPACITY, AT_ONCE,
        )  # fmt: skip
        lane = tl.arange(0, CAPACITY)
        key = tl.load(candidate_key + row * CAPACITY + lane, mask=lane < num_candidates, other=INT_MIN)
        index = tl.load(candidate_index + row * CAPACITY + lane, mask=lane < num_candidates, other=INT_MAX)
        candidate_mass = tl.sum(_fixed_mass(key, largest, inverse), axis=0).to(tl.float32) * 9.094947017729282e-13
        is_complete = by_k | ((k == vocab_size) & (p < 1.0) & (candidate_mass >= p * whole_mass))
        is_complete |= (m > 0.0) & (k == vocab_size) & (p >= 1.0) & ((_value(bound) - largest) * inverse < log_min_p)
        if (num_candidates <= CAPACITY) & (row_fits | is_complete | (n > 0.0)):
            token = _draw_candidates(
                key, index, k, p, whole_mass, floor, largest, inverse, log_min_p, lo, hi, at, vocab_size, KEY_SHIFT
            )
        else:
            token = _draw_row(
                row_logits, row_stops, stop_masked, k, p, whole_mass, floor, largest, inverse, log_min_p, lo, hi, at, vocab_size,
                KEY_SHIFT, TILE,
            )  # fmt: skip
        tl.store(out + row, tl.where(is_valid, token, _INVALID_TOKEN))


def launch_sample(logits: Tensor, slots: Tensor, state: SlotTensors, out: Tensor, greedy_below: float) -> None:
    """Write the token of row i to out[i]. The workspace is allocated here: in a CUDA graph it belongs to the graph's pool."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and rows > 0
    chunks = cdiv(vocab_size, _CHUNK)
    subs = next_power_of_2(cdiv(vocab_size, _SUB))
    sizes = (chunks, chunks, chunks * (_CHUNK // _SUB), 2, 3 * chunks, subs, _CAPACITY, _CAPACITY)
    sizes = [cdiv(rows * size, 64) * 64 for size in sizes]  # aligned parts for any number of rows
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=logits.device).split(sizes)
    shared = (logits, logits.stride(0), slots, state.arena, state.field_stride, state.stop_ids)
    # enable_fp_fusion=False: a score rounds as in the reference.
    partial_kernel[(rows, chunks)](
        *shared, *parts[:4], parts[4].view(torch.float32), vocab_size, chunks,
        GREEDY_BELOW=greedy_below, CHUNK=_CHUNK, SUB=_SUB, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    finish_kernel[(rows,)](
        *shared, *parts[:4], parts[4].view(torch.float32), *parts[5:], out, vocab_size, chunks,
        GREEDY_BELOW=greedy_below, CHUNKS=next_power_of_2(chunks), SUBS=subs, SUB=_SUB, TILE=_CHUNK,
        CAPACITY=_CAPACITY, AT_ONCE=_SUBS_AT_ONCE, KEY_SHIFT=_KEY_SHIFT[logits.dtype], num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
