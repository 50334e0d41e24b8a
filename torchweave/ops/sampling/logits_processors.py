"""Resampling of rows with logits processors: penalties, biases, bad words, and grammar masks.

A step samples every row from its unprocessed logits. The few rows with logits processors are then sampled again from processed
logits, and their slots are corrected; so the step, mostly a CUDA graph, does not depend on them. The state of a row between
steps (token counts of its answer, recent tokens) is in a *state row* on the device and is updated there, so that the next step
may be launched before the host has read a token.

Order, as in vLLM: bias (with disallowed tokens and bad words of one token), repetition penalty, frequency and presence penalty,
bad words of several tokens, grammar mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.kernels.sampling import layout
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState, advance

_MIN_STATE_ROWS = 8
_LOOKBACK = np.arange(1, layout.MAX_BAD_WORD_TOKENS)


@dataclass(frozen=True)
class LogitsStateInit:
    """Initial content of a state row for a request that starts or resumes. None for parts that the request does not use.

    Attributes:
        counts: token ids and their counts, both int32 [n]; all others are 0.
        bias: default bias, and exceptions: ids int32 [n] and biases float32 [n].
        words: int32 [words, MAX_BAD_WORD_TOKENS]; a word's last token first, then backwards, -1 after its first. A word of one
            token is a stop token beyond the slot's capacity: excluded below the slot's min_position, as the slot's own are.
        recent_tokens: int32 [MAX_BAD_WORD_TOKENS]; the answer's token at position p is at p % MAX_BAD_WORD_TOKENS, -1 for none.
    """

    state_row: int
    counts: tuple[np.ndarray, np.ndarray] | None = None
    bias: tuple[float, np.ndarray, np.ndarray] | None = None
    words: np.ndarray | None = None
    recent_tokens: np.ndarray | None = None


class LogitsProcessorState:
    """Device state of logits processors. P grows with the concurrent requests that use it; each part is allocated on first use.

    counts int32 [P, V], bias float32 [P, V], words int32 [P, W, MAX_BAD_WORD_TOKENS],
    recent_tokens int32 [P, MAX_BAD_WORD_TOKENS]
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self.words = torch.zeros(0, 1, layout.MAX_BAD_WORD_TOKENS, dtype=torch.int32, device=device)
        self.recent_tokens = torch.zeros(0, layout.MAX_BAD_WORD_TOKENS, dtype=torch.int32, device=device)

    def join(self, join: LogitsStateInit) -> None:
        """Write a state row, in the order of the current stream."""
        at = join.state_row
        if join.counts is not None:
            self.counts = _grow(self.counts, at)
            ids, counts = (self._on_device(values) for values in join.counts)
            self.counts[at].zero_().index_copy_(0, ids.long(), counts)
        if join.bias is not None:
            self.bias = _grow(self.bias, at)
            others, *arrays = join.bias
            ids, biases = (self._on_device(values) for values in arrays)
            self.bias[at].fill_(others).index_copy_(0, ids.long(), biases)
        if join.words is not None and join.recent_tokens is not None:
            self.words = _grow_words(_grow(self.words, at), len(join.words))
            self.recent_tokens = _grow(self.recent_tokens, at)
            self.words[at].fill_(-1)[: len(join.words)] = self._on_device(join.words)
            self.recent_tokens[at] = self._on_device(join.recent_tokens)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _grow(part: Tensor, state_row: int) -> Tensor:
    """`part` with at least `state_row + 1` rows, its content kept."""
    size = max(len(part), _MIN_STATE_ROWS)
    while size <= state_row:
        size *= 2
    if size == len(part):
        return part
    larger = part.new_zeros(size, *part.shape[1:])
    larger[: len(part)] = part
    return larger


def _grow_words(words: Tensor, count: int) -> Tensor:
    """`words` with capacity for `count` words a row."""
    if count <= words.shape[1]:
        return words
    larger = words.new_full((len(words), 1 << (count - 1).bit_length(), layout.MAX_BAD_WORD_TOKENS), -1)
    larger[:, : words.shape[1]] = words
    return larger


def resample(
    logits: Tensor,
    rows: Tensor,
    masks: Tensor | None,
    state: SlotState,
    processor_state: LogitsProcessorState,
    tokens: Tensor,
    out: Tensor,
    replaced: Tensor | None = None,
) -> None:
    """Sample again the tokens of some rows of a step that has run, including `advance`.

    `replaced` float32 [K, V]: logits of the rows instead of those of the step.

    logits [N, V] of the step; rows int32 [NUM_FIELDS, K], a record a column (the penalties as the bits of a float32); masks
    int32 [M, ceil(V / 32)] or None: bit v % 32 of word v / 32 allows token v. Writes the rows of tokens and out, int32 [N],
    `out` as in `advance`; updates slots and state rows.
    """
    assert rows.shape[0] == layout.NUM_FIELDS, rows.shape
    slots, size = rows[layout.SLOT], rows.shape[1]
    source = rows
    if replaced is not None:
        logits, source = replaced, rows.clone()
        source[layout.ROW] = torch.arange(size, dtype=torch.int32, device=rows.device)
    processed = torch.empty(size, logits.shape[1], dtype=torch.float32, device=logits.device)
    encoded, emit_all = torch.empty_like(slots), torch.ones_like(slots)
    if state.device.type == "cuda":
        from torchweave.ops.kernels.sampling.logits_processors import (
            launch_commit,
            launch_process_logits,
            launch_rewind,
        )

        launch_process_logits(logits, source, masks, processor_state, processed)
        launch_rewind(rows, state, processor_state, processed)
        sampled = sample(processed, slots, state)
        advance(sampled, slots, emit_all, state, encoded)
        launch_commit(rows, sampled, encoded, state, processor_state, tokens, out)
        return
    process_logits_reference(logits, source, masks, processor_state, processed)
    rewind_reference(rows, state, processor_state, processed)
    sampled = sample(processed, slots, state)
    advance(sampled, slots, emit_all, state, encoded)
    commit_reference(rows, sampled, encoded, state, processor_state, tokens, out)


def process_logits_reference(
    logits: Tensor, rows: Tensor, masks: Tensor | None, processor_state: LogitsProcessorState, processed: Tensor
) -> None:
    """processed float32 [K, V] = the logits of `rows` with bias, penalties and mask."""
    records, values = rows.numpy(), processed.numpy()
    processed.copy_(logits[rows[layout.ROW].long()])
    state_row, flags, mask = records[layout.STATE_ROW], records[layout.FLAGS], records[layout.MASK]
    biased = np.flatnonzero(flags & layout.HAS_BIAS)
    if biased.size:
        values[biased] += processor_state.bias.numpy()[state_row[biased]]
    counted = np.flatnonzero(flags & layout.HAS_COUNTS)
    if counted.size:
        penalties = records[layout.PRESENCE : layout.REPETITION + 1, counted, None].view(np.float32)
        values[counted] = _apply_penalties(
            values[counted], processor_state.counts.numpy()[state_row[counted]], *penalties
        )
    masked = np.flatnonzero(mask >= 0)
    if masked.size:
        assert masks is not None
        words = np.ascontiguousarray(masks.numpy()[mask[masked]])
        allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=values.shape[1])
        values[masked] = np.where(allowed != 0, values[masked], np.float32(-np.inf))


def _apply_penalties(
    values: np.ndarray, counts: np.ndarray, presence: np.ndarray, frequency: np.ndarray, repetition: np.ndarray
) -> np.ndarray:
    """values float32 [K, V] and counts int32 [K, V] with penalties float32 [K, 1]."""
    repeated = np.where(values > 0, values / repetition, values * repetition)
    output_count = (counts & (layout.IN_PROMPT - 1)).astype(np.float32)
    values = np.where(counts != 0, repeated, values) - frequency * output_count
    return values - np.where(output_count > 0, presence, np.float32(0))


def rewind_reference(rows: Tensor, state: SlotState, processor_state: LogitsProcessorState, processed: Tensor) -> None:
    """Exclude tokens that would complete a bad word or stop below min_position; move each slot's position back by one."""
    records, values = rows.numpy(), processed.numpy()
    at = state.host_arrays["position"][records[layout.SLOT]]
    state.host_arrays["position"][records[layout.SLOT]] = at - 1
    for i in np.flatnonzero(records[layout.FLAGS] & layout.HAS_BAD_WORDS):
        words = processor_state.words.numpy()[records[layout.STATE_ROW, i]]
        before = processor_state.recent_tokens.numpy()[
            records[layout.STATE_ROW, i], (at[i] - _LOOKBACK) % layout.MAX_BAD_WORD_TOKENS
        ]
        matches = ((words[:, 1:] < 0) | (words[:, 1:] == before)).all(axis=1) & (words[:, 0] >= 0)
        if at[i] >= state.host_arrays["min_position"][records[layout.SLOT, i]]:
            matches &= words[:, 1] >= 0
        ids = words[matches, 0]
        values[i, ids] = np.minimum(values[i, ids], np.float32(layout.BAD_WORD_LOGIT))


def commit_reference(
    rows: Tensor,
    sampled: Tensor,
    encoded: Tensor,
    state: SlotState,
    processor_state: LogitsProcessorState,
    tokens: Tensor,
    out: Tensor,
) -> None:
    """Write the new tokens to the step's results and to the state rows."""
    records, new = rows.numpy(), sampled.numpy()
    tokens.numpy()[records[layout.ROW]] = new
    out.numpy()[records[layout.ROW]] = encoded.numpy()
    counted = np.flatnonzero(records[layout.FLAGS] & layout.HAS_COUNTS)
    if counted.size:
        processor_state.counts.numpy()[records[layout.STATE_ROW, counted], np.maximum(new[counted], 0)] += 1
    worded = np.flatnonzero(records[layout.FLAGS] & layout.HAS_BAD_WORDS)
    if worded.size:
        at = state.host_arrays["position"][records[layout.SLOT, worded]] % layout.MAX_BAD_WORD_TOKENS
        processor_state.recent_tokens.numpy()[records[layout.STATE_ROW, worded], at] = new[worded]
