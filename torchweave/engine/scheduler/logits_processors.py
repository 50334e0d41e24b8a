"""Which running requests have their logits changed, and how: what the host tells the device about them.

Arrays over slots; Python runs for such a request when it starts and when it leaves, and with a step only where it has a grammar.
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
    """One record a slot; the requests that keep something on the device have a place there, the lowest that is free.

    A request with a grammar *rests* from the step that draws a token for it until it is known what may come next.

    Attributes:
        skipped: bool [slots].
        constraints: the grammars of running requests, by slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = np.zeros((NUM_FIELDS, num_slots), np.int32)
        self._records[SLOT] = np.arange(num_slots)
        self._records[MASK] = -1
        self.skipped = np.zeros(num_slots, bool)
        self.constraints: dict[int, Constraint] = {}
        self._enabled = np.zeros(num_slots, bool)
        self._free = list(range(num_slots))
        self._joins: list[LogitsStateInit] = []
        self._count = 0

    def start(self, slot: int, state: RequestState) -> None:
        """A request starts in a slot, or goes on there."""
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
        self._joins.append(
            LogitsStateInit(
                state_row,
                counts=_counts(state) if flags & HAS_COUNTS else None,
                bias=_bias(params) if flags & HAS_BIAS else None,
                words=_words(state) if flags & HAS_BAD_WORDS else None,
                recent_tokens=_tail(state) if flags & HAS_BAD_WORDS else None,
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
        """Forget everyone."""
        for slot in np.flatnonzero(self._enabled):
            self.release(int(slot))
        self._joins.clear()

    def runnable(self, slots: np.ndarray) -> np.ndarray:
        """Of generating slots those that do not rest."""
        return slots[~self.skipped[slots]] if self.constraints else slots

    def of(self, slots: np.ndarray, emits: np.ndarray) -> LogitsProcessorRows | None:
        """What a step has to change: None where nobody asked."""
        if not self._count:
            return None
        rows = np.flatnonzero(self._enabled[slots] & emits)
        if not rows.size and not self._joins:
            return None
        records = self._records[:, slots[rows]]
        records[ROW] = rows
        joins, self._joins = tuple(self._joins), []
        return LogitsProcessorRows(records, joins, self._masks(records) if self.constraints else None)

    def _masks(self, records: np.ndarray) -> np.ndarray | None:
        """What the grammars allow, for the records whose MASK then says which; these slots rest."""
        found = []
        for record in records.T:
            slot = int(record[SLOT])
            if slot in self.constraints:
                assert self.constraints[slot].ready, "a request with a grammar rests until its mask is there"
                record[MASK] = len(found)
                found.append(self.constraints[slot].mask)
                self.skipped[slot] = True
        return np.stack(found) if found else None


def flags_of(state: RequestState) -> int:
    """What a request needs a place for."""
    params = state.request.sampling
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    single = any(len(word) == 1 for word in params.bad_words or ())
    several = any(len(word) > 1 for word in params.bad_words or ()) or bool(_host_banned_stops(state))
    biased = bool(params.logit_bias) or params.allowed_token_ids is not None or single
    return HAS_COUNTS * bool(penalised) | HAS_BIAS * biased | HAS_BAD_WORDS * several


def _counts(state: RequestState) -> tuple[np.ndarray, np.ndarray]:
    # By a mark for each token up to the largest: to sort a prompt of 8,000 tokens takes ten times as long.
    size = int(max(state.prompt.max(initial=0), state.generated.max(initial=0))) + 1
    in_prompt, anywhere = np.zeros((2, size), bool)
    in_prompt[state.prompt] = anywhere[state.prompt] = anywhere[state.generated] = True
    ids = np.flatnonzero(anywhere)
    counts = IN_PROMPT * in_prompt[ids]
    if state.generated.size:
        counts += np.bincount(state.generated, minlength=size)[ids]
    return ids.astype(np.int32), counts.astype(np.int32)


def _bias(params: SamplingParams) -> tuple[float, np.ndarray, np.ndarray]:
    others, some = 0.0, dict(params.logit_bias or {})
    if params.allowed_token_ids is not None:
        others, some = -np.inf, {token: some.get(token, 0.0) for token in params.allowed_token_ids}
    for word in params.bad_words or ():
        if len(word) == 1 and (others == 0 or word[0] in some):
            some[int(word[0])] = BAD_WORD_LOGIT
    return others, np.array(list(some), np.int32), np.array(list(some.values()), np.float32)


def _host_banned_stops(state: RequestState) -> frozenset[int]:
    """Stop tokens that may not be drawn at first, and for which its slot has no room. A grammar's mask leaves them out."""
    return state.host_stop_ids if state.request.sampling.min_tokens and state.constraint is None else frozenset()


def _words(state: RequestState) -> np.ndarray:
    several = [word for word in state.request.sampling.bad_words or () if len(word) > 1]
    several += [[token] for token in _host_banned_stops(state)]
    table = np.full((len(several), MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(table, several, strict=True):
        row[: len(word)] = word[::-1]
    return table


def _tail(state: RequestState) -> np.ndarray:
    recent_tokens = np.full(MAX_BAD_WORD_TOKENS, -1, np.int32)
    last = state.generated[-MAX_BAD_WORD_TOKENS:]
    recent_tokens[np.arange(state.prefill_len - len(last), state.prefill_len) % MAX_BAD_WORD_TOKENS] = last
    return recent_tokens
