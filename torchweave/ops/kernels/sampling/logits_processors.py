"""Triton kernels of rows that are drawn again: their logits changed in one pass, their slots stepped back, their places advanced.

adjust   (rows x chunks of 4096)   bias, penalties, mask
rewind   (rows)                    barred words of several tokens, stop tokens before min_position; position[slot] -= 1
settle   (rows)                    tokens, counts and tails, when `sample` and `advance` have run again
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.sampling.logits_processors import (
    BARRED,
    FLAGS,
    FREQUENCY,
    HAS_BIAS,
    HAS_COUNTS,
    HAS_WORDS,
    IN_PROMPT,
    LONGEST_WORD,
    MASK,
    PLACE,
    PRESENCE,
    REPETITION,
    ROW,
    SLOT,
    AdjustState,
)
from torchweave.ops.slot_state import SlotState

_ROW, _SLOT, _PLACE, _FLAGS = tl.constexpr(ROW), tl.constexpr(SLOT), tl.constexpr(PLACE), tl.constexpr(FLAGS)
_MASK, _PRESENCE = tl.constexpr(MASK), tl.constexpr(PRESENCE)
_FREQUENCY, _REPETITION = tl.constexpr(FREQUENCY), tl.constexpr(REPETITION)
_COUNTS, _BIAS, _WORDS = tl.constexpr(HAS_COUNTS), tl.constexpr(HAS_BIAS), tl.constexpr(HAS_WORDS)
_IN_PROMPT, _BARRED, _LONGEST = tl.constexpr(IN_PROMPT), tl.constexpr(BARRED), tl.constexpr(LONGEST_WORD)
_CHUNK = 4096
_WORDS_AT_ONCE = 16


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "masks"])
def adjust_kernel(
    logits, row_stride, rows, num_rows, masks, counts, bias, changed, vocab_size, mask_words, CHUNK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab_size
    row = tl.load(rows + _ROW * num_rows + i).to(tl.int64)
    place = tl.load(rows + _PLACE * num_rows + i).to(tl.int64)
    flags = tl.load(rows + _FLAGS * num_rows + i)
    mask = tl.load(rows + _MASK * num_rows + i).to(tl.int64)
    value = tl.load(logits + row * row_stride + index, mask=inside, other=0.0).to(tl.float32)
    if (flags & _BIAS) != 0:
        value += tl.load(bias + place * vocab_size + index, mask=inside, other=0.0)
    if (flags & _COUNTS) != 0:
        presence = tl.load(rows + _PRESENCE * num_rows + i).to(tl.float32, bitcast=True)
        frequency = tl.load(rows + _FREQUENCY * num_rows + i).to(tl.float32, bitcast=True)
        repetition = tl.load(rows + _REPETITION * num_rows + i).to(tl.float32, bitcast=True)
        count = tl.load(counts + place * vocab_size + index, mask=inside, other=0)
        repeated = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
        value = tl.where(count != 0, repeated, value)
        answered = (count & (_IN_PROMPT - 1)).to(tl.float32)
        value = value - frequency * answered - tl.where(answered > 0, presence, 0.0)
    if mask >= 0:
        word = tl.load(masks + mask * mask_words + index // 32, mask=inside, other=0)
        value = tl.where(((word >> (index % 32)) & 1) != 0, value, float("-inf"))
    tl.store(changed + i.to(tl.int64) * vocab_size + index, value, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_words"], do_not_specialize_on_alignment=["rows"])
def rewind_kernel(
    rows, num_rows, position, min_position, words, num_words, tail, changed, vocab_size, AT_ONCE: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    slot = tl.load(rows + _SLOT * num_rows + i)
    place = tl.load(rows + _PLACE * num_rows + i).to(tl.int64)
    flags = tl.load(rows + _FLAGS * num_rows + i)
    at = tl.load(position + slot)
    if (flags & _WORDS) != 0:
        early = at < tl.load(min_position + slot)
        back = tl.arange(0, _LONGEST)
        before = tl.load(tail + place * _LONGEST + (at - back + _LONGEST) % _LONGEST)
        for first in range(0, num_words, AT_ONCE):
            word = first + tl.arange(0, AT_ONCE)
            into = (place * num_words + word[:, None]) * _LONGEST + back[None, :]
            token = tl.load(words + into, mask=(word < num_words)[:, None], other=-1)
            differs = (back > 0)[None, :] & (token >= 0) & (token != before[None, :])
            last = tl.sum(tl.where(back[None, :] == 0, token, 0), axis=1)
            second = tl.sum(tl.where(back[None, :] == 1, token, 0), axis=1)
            fits = (tl.sum(differs.to(tl.int32), axis=1) == 0) & (last >= 0) & ((second >= 0) | early)
            to = changed + i.to(tl.int64) * vocab_size + last
            tl.store(to, tl.minimum(tl.load(to, mask=fits, other=0.0), _BARRED), mask=fits)
    tl.store(position + slot, at - 1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "drawn", "coded", "tokens", "out"])
def settle_kernel(rows, num_rows, drawn, coded, position, counts, tail, tokens, out, vocab_size):
    i = tl.program_id(0)
    row = tl.load(rows + _ROW * num_rows + i)
    slot = tl.load(rows + _SLOT * num_rows + i)
    place = tl.load(rows + _PLACE * num_rows + i).to(tl.int64)
    flags = tl.load(rows + _FLAGS * num_rows + i)
    token = tl.load(drawn + i)
    tl.store(tokens + row, token)
    tl.store(out + row, tl.load(coded + i))
    if (flags & _COUNTS) != 0:
        count = counts + place * vocab_size + token
        tl.store(count, tl.load(count) + 1)
    if (flags & _WORDS) != 0:
        tl.store(tail + place * _LONGEST + tl.load(position + slot) % _LONGEST, token)


def launch_adjust(logits: Tensor, rows: Tensor, masks: Tensor | None, places: AdjustState, changed: Tensor) -> None:
    vocab_size, size = logits.shape[1], rows.shape[1]
    assert logits.stride(1) == 1 and changed.is_contiguous() and rows.is_contiguous()
    masks = rows if masks is None else masks  # then no row names one
    # Without fused multiply-adds a logit rounds as in the reference.
    adjust_kernel[(size, triton.cdiv(vocab_size, _CHUNK))](
        logits, logits.stride(0), rows, size, masks, places.counts, places.bias, changed, vocab_size, -(-vocab_size // 32),
        CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_rewind(rows: Tensor, state: SlotState, places: AdjustState, changed: Tensor) -> None:
    rewind_kernel[(rows.shape[1],)](
        rows, rows.shape[1], state.position, state.min_position, places.words, places.words.shape[1], places.tail, changed,
        changed.shape[1], AT_ONCE=_WORDS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def launch_settle(
    rows: Tensor, drawn: Tensor, coded: Tensor, state: SlotState, places: AdjustState, tokens: Tensor, out: Tensor
) -> None:
    settle_kernel[(rows.shape[1],)](
        rows, rows.shape[1], drawn, coded, state.position, places.counts, places.tail, tokens, out, places.vocab_size,
        num_warps=1,
    )  # fmt: skip
