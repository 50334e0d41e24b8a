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
from torchweave.ops.kernels.sampling import layout
from torchweave.ops.sampling.logits_processors import LogitsStateInit


class LogitsProcessors:
    """One record per slot. Requests with state on the device have a state row there, the lowest free one.

    A request with a grammar skips steps from the one that samples its token until its next token mask is ready.

    Attributes:
        enabled: bool [slots], slots whose logits are processed.
        skipped: bool [slots], slots that wait for their mask.
        count: number of slots whose logits are processed.
        constraints: grammars of running requests, by slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = np.zeros((layout.NUM_FIELDS, num_slots), np.int32)
        self._records[layout.SLOT] = np.arange(num_slots)
        self._records[layout.MASK] = -1
        self.skipped = np.zeros(num_slots, bool)
        self.constraints: dict[int, Constraint] = {}
        self.enabled = np.zeros(num_slots, bool)
        self._free = list(range(num_slots))
        self._inits: list[LogitsStateInit] = []
        self.count = 0

    def start(self, slot: int, state: RequestState) -> None:
        """Start or resume a request that has logits processors."""
        flags = state.processor_flags
        self._records[layout.FLAGS, slot] = flags
        if state.constraint is not None:
            self.constraints[slot] = state.constraint
        self.enabled[slot] = True
        self.count += 1
        if flags:
            self._assign_state_row(slot, state, flags)

    def _assign_state_row(self, slot: int, state: RequestState, flags: int) -> None:
        params, state_row = state.request.sampling, heapq.heappop(self._free)
        self._records[layout.STATE_ROW, slot] = state_row
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._records[layout.PRESENCE : layout.REPETITION + 1, slot] = np.array(penalties, np.float32).view(np.int32)
        self._inits.append(
            LogitsStateInit(
                state_row,
                counts=_counts(state) if flags & layout.HAS_COUNTS else None,
                bias=_bias(params) if flags & layout.HAS_BIAS else None,
                words=_words(state) if flags & layout.HAS_BAD_WORDS else None,
                recent_tokens=_recent_tokens(state) if flags & layout.HAS_BAD_WORDS else None,
            )
        )

    def release(self, slot: int) -> None:
        self.enabled[slot] = self.skipped[slot] = False
        self.count -= 1
        self.constraints.pop(slot, None)
        if self._records[layout.FLAGS, slot]:
            self._records[layout.FLAGS, slot] = 0
            heapq.heappush(self._free, int(self._records[layout.STATE_ROW, slot]))

    def clear(self) -> None:
        """Release all slots."""
        for slot in np.flatnonzero(self.enabled):
            self.release(int(slot))
        self._inits.clear()

    def rows_of_step(self, slots: np.ndarray, emits: np.ndarray) -> LogitsProcessorRows | None:
        """Rows of a step whose logits are processed, and new requests' state; None if there are neither."""
        rows = np.flatnonzero(self.enabled[slots] & emits)
        if not rows.size and not self._inits:
            return None
        records = self._records[:, slots[rows]]
        records[layout.ROW] = rows
        inits, self._inits = tuple(self._inits), []
        return LogitsProcessorRows(records, inits, self._masks(records) if self.constraints else None)

    def _masks(self, records: np.ndarray) -> np.ndarray | None:
        """Token masks of the records with a grammar, indexed by their MASK field. Their slots are skipped from here on."""
        masks = []
        for record in records.T:
            slot = int(record[layout.SLOT])
            if slot in self.constraints:
                assert self.constraints[slot].ready, "a request with a grammar skips steps until its mask is ready"
                record[layout.MASK] = len(masks)
                masks.append(self.constraints[slot].mask)
                self.skipped[slot] = True
        return np.stack(masks) if masks else None


def _counts(state: RequestState) -> tuple[np.ndarray, np.ndarray]:
    # A flag per token id up to the largest: sorting a prompt of 8,000 tokens takes ten times as long.
    size = int(max(state.prompt.max(initial=0), state.generated.max(initial=0))) + 1
    in_prompt, in_sequence = np.zeros((2, size), bool)
    in_prompt[state.prompt] = in_sequence[state.prompt] = in_sequence[state.generated] = True
    ids = np.flatnonzero(in_sequence)
    counts = layout.IN_PROMPT * in_prompt[ids]
    if state.generated.size:
        counts += np.bincount(state.generated, minlength=size)[ids]
    return ids.astype(np.int32), counts.astype(np.int32)


def _bias(params: SamplingParams) -> tuple[float, np.ndarray, np.ndarray]:
    default, bias = 0.0, dict(params.logit_bias or {})
    if params.allowed_token_ids is not None:
        default, bias = -np.inf, {token: bias.get(token, 0.0) for token in params.allowed_token_ids}
    for word in params.bad_words or ():
        if len(word) == 1 and (default == 0 or word[0] in bias):
            bias[int(word[0])] = layout.BAD_WORD_LOGIT
    return default, np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


def _words(state: RequestState) -> np.ndarray:
    words = [word for word in state.request.sampling.bad_words or () if len(word) > 1]
    words += [[token] for token in state.host_banned_stops]
    table = np.full((len(words), layout.MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = word[::-1]
    return table


def _recent_tokens(state: RequestState) -> np.ndarray:
    recent_tokens = np.full(layout.MAX_BAD_WORD_TOKENS, -1, np.int32)
    last = state.generated[-layout.MAX_BAD_WORD_TOKENS :]
    recent_tokens[np.arange(state.prefill_len - len(last), state.prefill_len) % layout.MAX_BAD_WORD_TOKENS] = last
    return recent_tokens
