"""Rows whose logits are changed before their token is drawn: penalties, biases, barred words, and masks of a grammar.

A step samples every row from the logits as they are. The few rows that ask for more are drawn again behind it, from logits that
were changed for them, and their slots are put right; so the step itself, a graph mostly, knows nothing of them. What such a row
needs from step to step (how often its answer holds each token, what was drawn last) lives on the device in a *place* and is brought
up to date there, so that the next step may be launched before the host has seen a token.

In this order, as in vLLM: bias (and what is not allowed, or barred by itself), repetition penalty, frequency and presence penalty,
barred words of several tokens, grammar mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import (
    BAD_WORD_LOGIT,
    FLAGS,
    HAS_BAD_WORDS,
    HAS_BIAS,
    HAS_COUNTS,
    IN_PROMPT,
    MASK,
    MAX_BAD_WORD_TOKENS,
    NUM_FIELDS,
    PRESENCE,
    REPETITION,
    ROW,
    SLOT,
    STATE_ROW,
)
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState
from torchweave.ops.step_io import advance

_MIN_STATE_ROWS = 8
_LOOKBACK = np.arange(1, MAX_BAD_WORD_TOKENS)


@dataclass(frozen=True)
class LogitsStateInit:
    """What a place holds for a request that starts, or goes on after a pause. Parts that are None are not used by it.

    Attributes:
        counts: token ids and their counts, both int32 [n]; all others are 0.
        bias: the bias of all tokens but some, and those: ids int32 [n] and biases float32 [n].
        words: int32 [words, MAX_BAD_WORD_TOKENS]; a word's last token first, then backwards, -1 behind its first. A
        word of one token is
            a stop token that the slot has no room for: barred below the slot's min_position, as those that it holds are.
        recent_tokens: int32 [MAX_BAD_WORD_TOKENS]; the answer's token at position p stands at p % MAX_BAD_WORD_TOKENS, -1 where
        there is none.
    """

    state_row: int
    counts: tuple[np.ndarray, np.ndarray] | None = None
    bias: tuple[float, np.ndarray, np.ndarray] | None = None
    words: np.ndarray | None = None
    recent_tokens: np.ndarray | None = None


class LogitsProcessorState:
    """The places. P grows with the requests that ask at once; a part is allocated when the first of them needs it.

    counts int32 [P, V], bias float32 [P, V], words int32 [P, W, MAX_BAD_WORD_TOKENS], tail int32 [P, MAX_BAD_WORD_TOKENS]
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self.words = torch.zeros(0, 1, MAX_BAD_WORD_TOKENS, dtype=torch.int32, device=device)
        self.recent_tokens = torch.zeros(0, MAX_BAD_WORD_TOKENS, dtype=torch.int32, device=device)

    def join(self, join: LogitsStateInit) -> None:
        """Write a place, in the order of the current stream."""
        at = join.state_row
        if join.counts is not None:
            self.counts = _grow(self.counts, at)
            ids, counts = (self._on_device(values) for values in join.counts)
            self.counts[at].zero_().index_copy_(0, ids.long(), counts)
        if join.bias is not None:
            self.bias = _grow(self.bias, at)
            others, *some = join.bias
            ids, biases = (self._on_device(values) for values in some)
            self.bias[at].fill_(others).index_copy_(0, ids.long(), biases)
        if join.words is not None and join.recent_tokens is not None:
            self.words = _grow_words(_grow(self.words, at), len(join.words))
            self.recent_tokens = _grow(self.recent_tokens, at)
            self.words[at].fill_(-1)[: len(join.words)] = self._on_device(join.words)
            self.recent_tokens[at] = self._on_device(join.recent_tokens)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _grow(part: Tensor, state_row: int) -> Tensor:
    """A part with at least `state_row + 1` places, its content kept."""
    size = max(len(part), _MIN_STATE_ROWS)
    while size <= state_row:
        size *= 2
    if size == len(part):
        return part
    larger = part.new_zeros(size, *part.shape[1:])
    larger[: len(part)] = part
    return larger


def _grow_words(words: Tensor, count: int) -> Tensor:
    """`words` with room for `count` words a place."""
    if count <= words.shape[1]:
        return words
    larger = words.new_full((len(words), 1 << (count - 1).bit_length(), MAX_BAD_WORD_TOKENS), -1)
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
) -> None:
    """Draw again the tokens of some rows of a step that was just carried out, `advance` included.

    logits [N, V] of the step; rows int32 [NUM_FIELDS, K], a record a column (the penalties as the bits of a float32); masks int32
    [M, ceil(V / 32)] or None: bit v % 32 of word v / 32 says whether token v may be drawn. Writes the rows of tokens and out,
    int32 [N], `out` as in `advance`; brings slots and places up to date.
    """
    assert rows.shape[0] == NUM_FIELDS, rows.shape
    slots, size = rows[SLOT], rows.shape[1]
    processed = torch.empty(size, logits.shape[1], dtype=torch.float32, device=logits.device)
    encoded, emit_all = torch.empty_like(slots), torch.ones_like(slots)
    if state.device.type == "cuda":
        from torchweave.ops.kernels.sampling.logits_processors import (
            launch_commit,
            launch_process_logits,
            launch_rewind,
        )

        launch_process_logits(logits, rows, masks, processor_state, processed)
        launch_rewind(rows, state, processor_state, processed)
        sampled = sample(processed, slots, state)
        advance(sampled, slots, emit_all, state, encoded)
        launch_commit(rows, sampled, encoded, state, processor_state, tokens, out)
        return
    process_logits_reference(logits, rows, masks, processor_state, processed)
    rewind_reference(rows, state, processor_state, processed)
    sampled = sample(processed, slots, state)
    advance(sampled, slots, emit_all, state, encoded)
    commit_reference(rows, sampled, encoded, state, processor_state, tokens, out)


def process_logits_reference(
    logits: Tensor, rows: Tensor, masks: Tensor | None, processor_state: LogitsProcessorState, processed: Tensor
) -> None:
    """changed float32 [K, V] = the logits of `rows` with bias, penalties and mask."""
    records, values = rows.numpy(), processed.numpy()
    processed.copy_(logits[rows[ROW].long()])
    state_row, flags, mask = records[STATE_ROW], records[FLAGS], records[MASK]
    biased = np.flatnonzero(flags & HAS_BIAS)
    if biased.size:
        values[biased] += processor_state.bias.numpy()[state_row[biased]]
    counted = np.flatnonzero(flags & HAS_COUNTS)
    if counted.size:
        penalties = records[PRESENCE : REPETITION + 1, counted, None].view(np.float32)
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
    output_count = (counts & (IN_PROMPT - 1)).astype(np.float32)
    values = np.where(counts != 0, repeated, values) - frequency * output_count
    return values - np.where(output_count > 0, presence, np.float32(0))


def rewind_reference(rows: Tensor, state: SlotState, processor_state: LogitsProcessorState, processed: Tensor) -> None:
    """Bar what would end a barred word, or the answer too early, and take each slot's position back to before its token."""
    records, values = rows.numpy(), processed.numpy()
    at = state.host_arrays["position"][records[SLOT]]
    state.host_arrays["position"][records[SLOT]] = at - 1
    for i in np.flatnonzero(records[FLAGS] & HAS_BAD_WORDS):
        words = processor_state.words.numpy()[records[STATE_ROW, i]]
        before = processor_state.recent_tokens.numpy()[records[STATE_ROW, i], (at[i] - _LOOKBACK) % MAX_BAD_WORD_TOKENS]
        matches = ((words[:, 1:] < 0) | (words[:, 1:] == before)).all(axis=1) & (words[:, 0] >= 0)
        if at[i] >= state.host_arrays["min_position"][records[SLOT, i]]:
            matches &= words[:, 1] >= 0
        ids = words[matches, 0]
        values[i, ids] = np.minimum(values[i, ids], np.float32(BAD_WORD_LOGIT))


def commit_reference(
    rows: Tensor,
    sampled: Tensor,
    encoded: Tensor,
    state: SlotState,
    processor_state: LogitsProcessorState,
    tokens: Tensor,
    out: Tensor,
) -> None:
    """Hand the new tokens over, and write them down in the places."""
    records, new = rows.numpy(), sampled.numpy()
    tokens.numpy()[records[ROW]] = new
    out.numpy()[records[ROW]] = encoded.numpy()
    counted = np.flatnonzero(records[FLAGS] & HAS_COUNTS)
    if counted.size:
        processor_state.counts.numpy()[records[STATE_ROW, counted], new[counted]] += 1
    worded = np.flatnonzero(records[FLAGS] & HAS_BAD_WORDS)
    if worded.size:
        at = state.host_arrays["position"][records[SLOT, worded]] % MAX_BAD_WORD_TOKENS
        processor_state.recent_tokens.numpy()[records[STATE_ROW, worded], at] = new[worded]
