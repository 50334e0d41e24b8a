"""Triton kernels of resampled rows: process their logits, rewind their slots, commit the new tokens.

process_logits (rows x chunks of 4096)   bias, penalties, mask
rewind         (rows)                    bad words of several tokens, stop tokens before min_position; position[slot] -= 1
commit         (rows)                    tokens, counts and recent tokens, after `sample` and `advance` have run again
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.sampling import layout
from torchweave.ops.kernels.sampling.layout import LogitsProcessorTensors, SlotTensors
from torchweave.ops.kernels.sizes import cdiv

_ROW, _SLOT, _STATE_ROW, _FLAGS = map(tl.constexpr, (layout.ROW, layout.SLOT, layout.STATE_ROW, layout.FLAGS))
_MASK, _PRESENCE = map(tl.constexpr, (layout.MASK, layout.PRESENCE))
_FREQUENCY, _REPETITION = map(tl.constexpr, (layout.FREQUENCY, layout.REPETITION))
_COUNTS, _BIAS, _WORDS = map(tl.constexpr, (layout.HAS_COUNTS, layout.HAS_BIAS, layout.HAS_BAD_WORDS))
_IN_PROMPT, _BAD_WORD_LOGIT = map(tl.constexpr, (layout.IN_PROMPT, layout.BAD_WORD_LOGIT))
_MAX_BAD_WORD_TOKENS = tl.constexpr(layout.MAX_BAD_WORD_TOKENS)
_CHUNK = 4096
_WORDS_AT_ONCE = 16


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "masks"])
def process_logits_kernel(
    logits, row_stride, rows, num_rows, masks, counts, bias, processed, vocab_size, mask_words, CHUNK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab_size
    row = tl.load(rows + _ROW * num_rows + i).to(tl.int64)
    state_row = tl.load(rows + _STATE_ROW * num_rows + i).to(tl.int64)
    flags = tl.load(rows + _FLAGS * num_rows + i)
    mask = tl.load(rows + _MASK * num_rows + i).to(tl.int64)
    value = tl.load(logits + row * row_stride + index, mask=inside, other=0.0).to(tl.float32)
    if (flags & _BIAS) != 0:
        value += tl.load(bias + state_row * vocab_size + index, mask=inside, other=0.0)
    if (flags & _COUNTS) != 0:
        presence = tl.load(rows + _PRESENCE * num_rows + i).to(tl.float32, bitcast=True)
        frequency = tl.load(rows + _FREQUENCY * num_rows + i).to(tl.float32, bitcast=True)
        repetition = tl.load(rows + _REPETITION * num_rows + i).to(tl.float32, bitcast=True)
        count = tl.load(counts + state_row * vocab_size + index, mask=inside, other=0)
        repeated = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
        value = tl.where(count != 0, repeated, value)
        output_count = (count & (_IN_PROMPT - 1)).to(tl.float32)
        value = value - frequency * output_count - tl.where(output_count > 0, presence, 0.0)
    if mask >= 0:
        word = tl.load(masks + mask * mask_words + index // 32, mask=inside, other=0)
        value = tl.where(((word >> (index % 32)) & 1) != 0, value, float("-inf"))
    tl.store(processed + i.to(tl.int64) * vocab_size + index, value, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_words"], do_not_specialize_on_alignment=["rows"])
def rewind_kernel(
    rows, num_rows, position, min_position, words, num_words, recent_tokens, processed, vocab_size, AT_ONCE: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    slot = tl.load(rows + _SLOT * num_rows + i)
    state_row = tl.load(rows + _STATE_ROW * num_rows + i).to(tl.int64)
    flags = tl.load(rows + _FLAGS * num_rows + i)
    at = tl.load(position + slot)
    if (flags & _WORDS) != 0:
        early = at < tl.load(min_position + slot)
        back = tl.arange(0, _MAX_BAD_WORD_TOKENS)
        before = tl.load(
            recent_tokens + state_row * _MAX_BAD_WORD_TOKENS + (at - back + _MAX_BAD_WORD_TOKENS) % _MAX_BAD_WORD_TOKENS
        )
        for first in range(0, num_words, AT_ONCE):
            word = first + tl.arange(0, AT_ONCE)
            into = (state_row * num_words + word[:, None]) * _MAX_BAD_WORD_TOKENS + back[None, :]
            token = tl.load(words + into, mask=(word < num_words)[:, None], other=-1)
            differs = (back > 0)[None, :] & (token >= 0) & (token != before[None, :])
            last = tl.sum(tl.where(back[None, :] == 0, token, 0), axis=1)
            second = tl.sum(tl.where(back[None, :] == 1, token, 0), axis=1)
            matches = (tl.sum(differs.to(tl.int32), axis=1) == 0) & (last >= 0) & ((second >= 0) | early)
            to = processed + i.to(tl.int64) * vocab_size + last
            tl.store(to, tl.minimum(tl.load(to, mask=matches, other=0.0), _BAD_WORD_LOGIT), mask=matches)
    tl.store(position + slot, at - 1)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "sampled", "encoded", "tokens", "out"]
)
def commit_kernel(rows, num_rows, sampled, encoded, position, counts, recent_tokens, tokens, out, vocab_size):
    i = tl.program_id(0)
    row = tl.load(rows + _ROW * num_rows + i)
    slot = tl.load(rows + _SLOT * num_rows + i)
    state_row = tl.load(rows + _STATE_ROW * num_rows + i).to(tl.int64)
    flags = tl.load(rows + _FLAGS * num_rows + i)
    token = tl.load(sampled + i)
    tl.store(tokens + row, token)
    tl.store(out + row, tl.load(encoded + i))
    if (flags & _COUNTS) != 0:
        count = counts + state_row * vocab_size + tl.maximum(token, 0)  # may be invalid
        tl.store(count, tl.load(count) + 1)
    if (flags & _WORDS) != 0:
        tl.store(
            recent_tokens + state_row * _MAX_BAD_WORD_TOKENS + tl.load(position + slot) % _MAX_BAD_WORD_TOKENS, token
        )


def launch_process_logits(
    logits: Tensor, rows: Tensor, masks: Tensor | None, processor_state: LogitsProcessorTensors, processed: Tensor
) -> None:
    vocab_size, size = logits.shape[1], rows.shape[1]
    assert logits.stride(1) == 1 and processed.is_contiguous() and rows.is_contiguous()
    masks = rows if masks is None else masks  # no row reads it then
    # enable_fp_fusion=False: a logit rounds as in the reference.
    process_logits_kernel[(size, cdiv(vocab_size, _CHUNK))](
        logits, logits.stride(0), rows, size, masks, processor_state.counts, processor_state.bias, processed,
        vocab_size, -(-vocab_size // 32),
        CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_rewind(rows: Tensor, state: SlotTensors, processor_state: LogitsProcessorTensors, processed: Tensor) -> None:
    rewind_kernel[(rows.shape[1],)](
        rows, rows.shape[1], state.position, state.min_position, processor_state.words, processor_state.words.shape[1],
        processor_state.recent_tokens, processed,
        processed.shape[1], AT_ONCE=_WORDS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def launch_commit(
    rows: Tensor,
    sampled: Tensor,
    encoded: Tensor,
    state: SlotTensors,
    processor_state: LogitsProcessorTensors,
    tokens: Tensor,
    out: Tensor,
) -> None:
    commit_kernel[(rows.shape[1],)](
        rows, rows.shape[1], sampled, encoded, state.position, processor_state.counts, processor_state.recent_tokens,
        tokens, out, processor_state.vocab_size,
        num_warps=1,
    )  # fmt: skip
