"""Host side of the logits processors: penalties, biases, bad words and grammar masks of the running requests.

Arrays over slots; Python runs when such a request starts and finishes, and per step only for requests with a grammar.
"""

from __future__ import annotations

import heapq

import numpy as np

from torchweave.engine.request import SamplingParams
from torchweave.engine.sampling.structured_output import Constraint
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import LogitsProcessorRows
from torchweave.ops.sampling.logits_processors import (
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
    LogitsStateInit,
)


class LogitsProcessors:
    """One record per slot. Requests with state on the device have a state row there, the lowest free one.

    A request with a grammar skips steps from the one that samples its token until its next token mask is ready.

    Attributes:
        skipped: bool [slots], slots that wait for their mask.
        constraints: grammars of running requests, by slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = np.zeros((NUM_FIELDS, num_slots), np.int32)
        self._records[SLOT] = np.arange(num_slots)
        self._records[MASK] = -1
        self.skipped = np.zeros(num_slots, bool)
        self.constraints: dict[int, Constraint] = {}
        self._enabled = np.zeros(num_slots, bool)
        self._free = list(range(num_slots))
        self._inits: list[LogitsStateInit] = []
        self._count = 0

    def start(self, slot: int, state: RequestState) -> None:
        """Start or resume a request in a slot."""
        flags = flags_of(state)
        self._records[FLAGS, slot] = flags
        if state.constraint is not None:
            self.constraints[slot] = state.constraint
        if flags or state.constraint is not None:
            self._enabled[slot] = True
            self._count += 1
        if flags:
            self._assign_state_row(slot, state, flags)

    def _assign_state_row(self, slot: int, state: RequestState, flags: int) -> None:
        params, state_row = state.request.sampling, heapq.heappop(self._free)
        self._records[STATE_ROW, slot] = state_row
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._records[PRESENCE : REPETITION + 1, slot] = np.array(penalties, np.float32).view(np.int32)
        self._inits.append(
            LogitsStateInit(
                state_row,
                counts=_counts(state) if flags & HAS_COUNTS else None,
                bias=_bias(params) if flags & HAS_BIAS else None,
                words=_words(state) if flags & HAS_BAD_WORDS else None,
                recent_tokens=_recent_tokens(state) if flags & HAS_BAD_WORDS else None,
            )
        )

    def release(self, slot: int) -> None:
        if self._enabled[slot]:
            self._enabled[slot] = self.skipped[slot] = False
            self._count -= 1
            self.constraints.pop(slot, None)
        if self._records[FLAGS, slot]:
            self._records[FLAGS, slot] = 0
            heapq.heappush(self._free, int(self._records[STATE_ROW, slot]))

    def clear(self) -> None:
        """Release all slots."""
        for slot in np.flatnonzero(self._enabled):
            self.release(int(slot))
        self._inits.clear()

    def runnable(self, slots: np.ndarray) -> np.ndarray:
        """The decode slots whose token mask is ready."""
        return slots[~self.skipped[slots]] if self.constraints else slots

    def rows_of_step(self, slots: np.ndarray, emits: np.ndarray) -> LogitsProcessorRows | None:
        """Rows of a step whose logits are processed, and new requests' state; None if there are neither."""
        if not self._count:
            return None
        rows = np.flatnonzero(self._enabled[slots] & emits)
        if not rows.size and not self._inits:
            return None
        records = self._records[:, slots[rows]]
        records[ROW] = rows
        inits, self._inits = tuple(self._inits), []
        return LogitsProcessorRows(records, inits, self._masks(records) if self.constraints else None)

    def _masks(self, records: np.ndarray) -> np.ndarray | None:
        """Token masks of the records with a grammar, indexed by their MASK field. Their slots are skipped from here on."""
        masks = []
        for record in records.T:
            slot = int(record[SLOT])
            if slot in self.constraints:
                assert self.constraints[slot].ready, "a request with a grammar skips steps until its mask is ready"
                record[MASK] = len(masks)
                masks.append(self.constraints[slot].mask)
                self.skipped[slot] = True
        return np.stack(masks) if masks else None


def flags_of(state: RequestState) -> int:
    """Flags of the device state that a request needs."""
    params = state.request.sampling
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    single = any(len(word) == 1 for word in params.bad_words or ())
    sequences = any(len(word) > 1 for word in params.bad_words or ()) or bool(_host_banned_stops(state))
    biased = bool(params.logit_bias) or params.allowed_token_ids is not None or single
    return HAS_COUNTS * bool(penalised) | HAS_BIAS * biased | HAS_BAD_WORDS * sequences


def _counts(state: RequestState) -> tuple[np.ndarray, np.ndarray]:
    # A flag per token id up to the largest: sorting a prompt of 8,000 tokens takes ten times as long.
    size = int(max(state.prompt.max(initial=0), state.generated.max(initial=0))) + 1
    in_prompt, in_sequence = np.zeros((2, size), bool)
    in_prompt[state.prompt] = in_sequence[state.prompt] = in_sequence[state.generated] = True
    ids = np.flatnonzero(in_sequence)
    counts = IN_PROMPT * in_prompt[ids]
    if state.generated.size:
        counts += np.bincount(state.generated, minlength=size)[ids]
    return ids.astype(np.int32), counts.astype(np.int32)


def _bias(params: SamplingParams) -> tuple[float, np.ndarray, np.ndarray]:
    default, bias = 0.0, dict(params.logit_bias or {})
    if params.allowed_token_ids is not None:
        default, bias = -np.inf, {token: bias.get(token, 0.0) for token in params.allowed_token_ids}
    for word in params.bad_words or ():
        if len(word) == 1 and (default == 0 or word[0] in bias):
            bias[int(word[0])] = BAD_WORD_LOGIT
    return default, np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


def _host_banned_stops(state: RequestState) -> frozenset[int]:
    """Stop tokens beyond the slot's table that `min_tokens` bans at first. A grammar's mask excludes them anyway."""
    return state.host_stop_ids if state.request.sampling.min_tokens and state.constraint is None else frozenset()


def _words(state: RequestState) -> np.ndarray:
    words = [word for word in state.request.sampling.bad_words or () if len(word) > 1]
    words += [[token] for token in _host_banned_stops(state)]
    table = np.full((len(words), MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = word[::-1]
    return table


def _recent_tokens(state: RequestState) -> np.ndarray:
    recent_tokens = np.full(MAX_BAD_WORD_TOKENS, -1, np.int32)
    last = state.generated[-MAX_BAD_WORD_TOKENS:]
    recent_tokens[np.arange(state.prefill_len - len(last), state.prefill_len) % MAX_BAD_WORD_TOKENS] = last
    return recent_tokens
