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

from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState
from torchweave.ops.step_io import advance

# Fields of a row's record, and bits of its FLAGS.
ROW, SLOT, PLACE, FLAGS, MASK, PRESENCE, FREQUENCY, REPETITION = range(8)
NUM_FIELDS = 8
HAS_COUNTS, HAS_BIAS, HAS_WORDS = 1, 2, 4

IN_PROMPT = 1 << 30
"""Added to a token's count where the prompt holds it; the rest is how often the answer does."""

BARRED = -1e30
"""Logit of a token that bad words bar. Not -inf: a grammar that allows nothing else must still have its way."""

LONGEST_WORD = 32
"""Tokens of a barred word at the most; so many tokens of the answer are looked back at."""

_FEWEST_PLACES = 8
_BACK = np.arange(1, LONGEST_WORD)


@dataclass(frozen=True)
class Join:
    """What a place holds for a request that starts, or goes on after a pause. Parts that are None are not used by it.

    Attributes:
        counts: token ids and their counts, both int32 [n]; all others are 0.
        bias: the bias of all tokens but some, and those: ids int32 [n] and biases float32 [n].
        words: int32 [words, LONGEST_WORD]; a word's last token first, then backwards, -1 behind its first. A word of one token is
            a stop token that the slot has no room for: barred below the slot's min_position, as those that it holds are.
        tail: int32 [LONGEST_WORD]; the answer's token at position p stands at p % LONGEST_WORD, -1 where there is none.
    """

    place: int
    counts: tuple[np.ndarray, np.ndarray] | None = None
    bias: tuple[float, np.ndarray, np.ndarray] | None = None
    words: np.ndarray | None = None
    tail: np.ndarray | None = None


class AdjustState:
    """The places. P grows with the requests that ask at once; a part is allocated when the first of them needs it.

    counts int32 [P, V], bias float32 [P, V], words int32 [P, W, LONGEST_WORD], tail int32 [P, LONGEST_WORD]
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self.words = torch.zeros(0, 1, LONGEST_WORD, dtype=torch.int32, device=device)
        self.tail = torch.zeros(0, LONGEST_WORD, dtype=torch.int32, device=device)

    def join(self, join: Join) -> None:
        """Write a place, in the order of the current stream."""
        at = join.place
        if join.counts is not None:
            self.counts = _with_room(self.counts, at)
            ids, counts = (self._on_device(values) for values in join.counts)
            self.counts[at].zero_().index_copy_(0, ids.long(), counts)
        if join.bias is not None:
            self.bias = _with_room(self.bias, at)
            others, *some = join.bias
            ids, biases = (self._on_device(values) for values in some)
            self.bias[at].fill_(others).index_copy_(0, ids.long(), biases)
        if join.words is not None and join.tail is not None:
            self.words = _with_words(_with_room(self.words, at), len(join.words))
            self.tail = _with_room(self.tail, at)
            self.words[at].fill_(-1)[: len(join.words)] = self._on_device(join.words)
            self.tail[at] = self._on_device(join.tail)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _with_room(part: Tensor, place: int) -> Tensor:
    """A part with at least `place + 1` places, its content kept."""
    size = max(len(part), _FEWEST_PLACES)
    while size <= place:
        size *= 2
    if size == len(part):
        return part
    larger = part.new_zeros(size, *part.shape[1:])
    larger[: len(part)] = part
    return larger


def _with_words(words: Tensor, count: int) -> Tensor:
    """`words` with room for `count` words a place."""
    if count <= words.shape[1]:
        return words
    larger = words.new_full((len(words), 1 << (count - 1).bit_length(), LONGEST_WORD), -1)
    larger[:, : words.shape[1]] = words
    return larger


def redraw(
    logits: Tensor,
    rows: Tensor,
    masks: Tensor | None,
    state: SlotState,
    places: AdjustState,
    tokens: Tensor,
    out: Tensor,
) -> None:
    """Draw again the tokens of some rows of a step that was just carried out, `advance` included.

    logits [N, V] of the step; rows int32 [NUM_FIELDS, K], a record a column (the penalties as the bits of a float32); masks int32
    [M, ceil(V / 32)] or None: bit v % 32 of word v / 32 says whether token v may be drawn. Writes the rows of tokens and out,
    int32 [N], `out` as in `advance`; brings slots and places up to date.
    """
    slots, size = rows[SLOT], rows.shape[1]
    changed = torch.empty(size, logits.shape[1], dtype=torch.float32, device=logits.device)
    coded, every = torch.empty_like(slots), torch.ones_like(slots)
    if state.device.type == "cuda":
        from torchweave.ops.kernels.sampling.logits_processors import launch_adjust, launch_rewind, launch_settle

        launch_adjust(logits, rows, masks, places, changed)
        launch_rewind(rows, state, places, changed)
        drawn = sample(changed, slots, state)
        advance(drawn, slots, every, state, coded)
        launch_settle(rows, drawn, coded, state, places, tokens, out)
        return
    adjust_reference(logits, rows, masks, places, changed)
    rewind_reference(rows, state, places, changed)
    drawn = sample(changed, slots, state)
    advance(drawn, slots, every, state, coded)
    settle_reference(rows, drawn, coded, state, places, tokens, out)


def adjust_reference(logits: Tensor, rows: Tensor, masks: Tensor | None, places: AdjustState, changed: Tensor) -> None:
    """changed float32 [K, V] = the logits of `rows` with bias, penalties and mask."""
    records, values = rows.numpy(), changed.numpy()
    changed.copy_(logits[rows[ROW].long()])
    place, flags, mask = records[PLACE], records[FLAGS], records[MASK]
    biased = np.flatnonzero(flags & HAS_BIAS)
    if biased.size:
        values[biased] += places.bias.numpy()[place[biased]]
    counted = np.flatnonzero(flags & HAS_COUNTS)
    if counted.size:
        penalties = records[PRESENCE : REPETITION + 1, counted, None].view(np.float32)
        values[counted] = _penalised(values[counted], places.counts.numpy()[place[counted]], *penalties)
    masked = np.flatnonzero(mask >= 0)
    if masked.size:
        assert masks is not None
        words = np.ascontiguousarray(masks.numpy()[mask[masked]])
        allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=values.shape[1])
        values[masked] = np.where(allowed != 0, values[masked], np.float32(-np.inf))


def _penalised(
    values: np.ndarray, counts: np.ndarray, presence: np.ndarray, frequency: np.ndarray, repetition: np.ndarray
) -> np.ndarray:
    """values float32 [K, V] and counts int32 [K, V] with penalties float32 [K, 1]."""
    repeated = np.where(values > 0, values / repetition, values * repetition)
    answered = (counts & (IN_PROMPT - 1)).astype(np.float32)
    values = np.where(counts != 0, repeated, values) - frequency * answered
    return values - np.where(answered > 0, presence, np.float32(0))


def rewind_reference(rows: Tensor, state: SlotState, places: AdjustState, changed: Tensor) -> None:
    """Bar what would end a barred word, or the answer too early, and take each slot's position back to before its token."""
    records, values = rows.numpy(), changed.numpy()
    at = state.host["position"][records[SLOT]]
    state.host["position"][records[SLOT]] = at - 1
    for i in np.flatnonzero(records[FLAGS] & HAS_WORDS):
        words = places.words.numpy()[records[PLACE, i]]
        before = places.tail.numpy()[records[PLACE, i], (at[i] - _BACK) % LONGEST_WORD]
        fits = ((words[:, 1:] < 0) | (words[:, 1:] == before)).all(axis=1) & (words[:, 0] >= 0)
        if at[i] >= state.host["min_position"][records[SLOT, i]]:
            fits &= words[:, 1] >= 0
        ids = words[fits, 0]
        values[i, ids] = np.minimum(values[i, ids], np.float32(BARRED))


def settle_reference(
    rows: Tensor, drawn: Tensor, coded: Tensor, state: SlotState, places: AdjustState, tokens: Tensor, out: Tensor
) -> None:
    """Hand the new tokens over, and write them down in the places."""
    records, new = rows.numpy(), drawn.numpy()
    tokens.numpy()[records[ROW]] = new
    out.numpy()[records[ROW]] = coded.numpy()
    counted = np.flatnonzero(records[FLAGS] & HAS_COUNTS)
    if counted.size:
        places.counts.numpy()[records[PLACE, counted], new[counted]] += 1
    worded = np.flatnonzero(records[FLAGS] & HAS_WORDS)
    if worded.size:
        at = state.host["position"][records[SLOT, worded]] % LONGEST_WORD
        places.tail.numpy()[records[PLACE, worded], at] = new[worded]
