"""Logits processors: penalties, biases, bad words and grammar masks.

Arrays over slots; Python runs when such a request starts and finishes, and per step only for requests with a grammar.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.sampling.host_biases import HostBiases
from torchweave.engine.sampling.structured_output import Constraint
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows, StoredRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload
from torchweave.ops.kernels.sampling import layout
from torchweave.ops.sampling.logits_processors import LogitsStateInit


@dataclass(frozen=True)
class LogitsProcessorRows(Payload):
    """Rows of a step whose logits are processed before sampling.

    Attributes:
        rows: int32 [NUM_FIELDS, K], one record per column; see `torchweave.ops.sampling.logits_processors`.
        joins: device state of new requests, to be written before the step.
        masks: int32 [M, ceil(V / 32)], bit masks of the tokens that a grammar allows; None if no row has a grammar.
        biases: of users' own processors: columns of `rows`, int64 [B], and what is added to their logits, float32 [B, V].
    """

    rows: np.ndarray
    joins: tuple[LogitsStateInit, ...] = ()
    masks: np.ndarray | None = None
    biases: tuple[np.ndarray, np.ndarray] | None = None

    def at_entries(self, query_len: int) -> LogitsProcessorRows:
        """The same for a step whose logits have `query_len` entries a row, of which these rows use the first."""
        if query_len == 1:
            return self
        rows = self.rows.copy()
        rows[layout.ROW] *= query_len
        return replace(self, rows=rows)


class LogitsProcessors:
    """One record per slot. Requests with state on the device have a state row there, the lowest free one.

    A request with a grammar skips steps from the one that samples its token until its next token mask is ready.

    Attributes:
        enabled: bool [slots], slots whose logits are processed.
        skipped: bool [slots], slots that wait for their mask.
        constraints: grammars of running requests, by slot.
    """

    def __init__(self, num_slots: int, host: HostBiases) -> None:
        self.host = host
        self._records = np.zeros((layout.NUM_FIELDS, num_slots), np.int32)
        self._records[layout.SLOT] = np.arange(num_slots)
        self._records[layout.MASK] = -1
        self.skipped = np.zeros(num_slots, bool)
        self.constraints: dict[int, Constraint] = {}
        self.enabled = np.zeros(num_slots, bool)
        self._free = list(range(num_slots))
        self._inits: list[LogitsStateInit] = []

    def start(self, slot: int, state: RequestState) -> None:
        """Start or resume a request that has logits processors."""
        flags = state.processor_flags
        self._records[layout.FLAGS, slot] = flags
        if state.constraint is not None:
            self.constraints[slot] = state.constraint
        if state.processed is not None:
            self.host.requests[slot] = state.processed
        self.enabled[slot] = True
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
        self.constraints.pop(slot, None)
        self.host.release(slot)
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
        masks = self._masks(records) if self.constraints else None
        return LogitsProcessorRows(records, inits, masks, self._biases(records) if self.host.requests else None)

    def _biases(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """`LogitsProcessorRows.biases`. Slots are skipped from here on, until their tokens are known."""
        columns = [column for column, slot in enumerate(records[layout.SLOT]) if int(slot) in self.host.requests]
        if not columns:
            return None
        slots = records[layout.SLOT, columns]
        self.skipped[slots] = True
        return np.array(columns, np.int64), np.stack([self.host.pending.pop(int(slot)) for slot in slots])

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


class ProcessorsPart(StepPart):
    """Processes logits, and holds requests with a grammar back until it, or their next mask, is ready."""

    name = "processors"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._biases = HostBiases(host.resources.logits_processors, host.limits.vocab_size)
        self.processors = LogitsProcessors(host.limits.max_batch_size, self._biases)
        self._grammars = host.resources.grammars
        self._failed: dict[int, str] = {}  # errors by slot

    def rejection_reason(self, request: InferenceRequest) -> str:
        if request.sampling.structured_outputs is not None and self._grammars is None:
            return "structured_outputs needs a tokenizer, but this model has none; leave structured_outputs out."
        return self._biases.rejection_reason(request)

    def add(self, state: RequestState) -> None:
        request = state.request
        if request.sampling.structured_outputs is not None:
            assert self._grammars is not None, "a request with a grammar was refused"
            state.constraint = self._grammars.constraint(request.sampling, state.stops, request.client)
            self.has_events = True
        state.processed = self._biases.keep(request.sampling, state.prompt)

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        if state.constraint is None and state.processed is None and not state.processor_flags:
            return False
        self.processors.start(slot, state)
        self.has_events |= state.constraint is not None or state.processed is not None
        if state.processed is not None:
            self._compute_biases([slot], [state.generated])
        return True

    def release(self, slot: int) -> None:
        self.processors.release(slot)

    def poll(self) -> list[RequestState]:
        """Resume requests whose grammar is ready; returns those that end with it and do not run."""
        waiting, running, ended = self.host.waiting, self.host.running, []
        for state in list(waiting.held.values()):
            assert state.constraint is not None
            if state.constraint.ready:
                waiting.remove(state.request.id)
                if state.ended_by_grammar():
                    ended.append(state)
                else:
                    waiting.admit(state)
        skipped, slots, known = self.processors.skipped, running.slots, []
        constraints, processed = self.processors.constraints, self._biases.requests
        for slot in {**constraints, **processed}:
            constraint = constraints.get(slot)
            if not skipped[slot] or slots.done[slot] or running.in_flight(slot):
                continue
            if constraint is not None and not constraint.ready:
                continue
            skipped[slot] = False
            state = slots.state_of(slot)
            if constraint is not None and state.ended_by_grammar() and state.reason is not None:
                self.host.finish(slot, state.reason)
            elif slot in processed:
                known.append(slot)
        if known:
            self._compute_biases(known, [slots.tokens[slot, : slots.num_generated[slot]] for slot in known])
        for slot, error in self._failed.items():
            if slot in processed and not slots.done[slot]:
                slots.state_of(slot).error = error
                self.host.finish(slot, "error")
        self._failed.clear()
        self.has_events = bool(waiting.held or constraints or processed)
        return ended

    def _compute_biases(self, slots: list[int], outputs: list[np.ndarray]) -> None:
        """Compute what is added to the next tokens' logits of `slots`; `poll` ends requests whose processor failed."""
        for slot, error in self._biases.compute(slots, outputs).items():
            self._biases.pending[slot] = np.zeros(self.host.limits.vocab_size, np.float32)  # of a step that is ignored
            self._failed[slot] = error

    def runnable(self, decoding: np.ndarray) -> np.ndarray:
        waits = self.processors.constraints or self._biases.requests
        return decoding[~self.processors.skipped[decoding]] if waits else decoding

    def payload(self, rows: StepRows) -> LogitsProcessorRows | None:
        return self.processors.rows_of_step(rows.slots, rows.emits)

    def stored(self, rows: StoredRows) -> None:
        """Advance the grammars of requests that go on."""
        if not self.processors.constraints:
            return
        table = self.host.running.slots
        remaining = np.flatnonzero(table.needs_host_work[rows.slots] & ~rows.ended)
        pairs = ((table.state_of(int(rows.slots[i])).constraint, int(rows.tokens[i])) for i in remaining)
        if sampled := [(constraint, token) for constraint, token in pairs if constraint is not None]:
            assert self._grammars is not None
            self._grammars.advance(sampled)

    def clear(self) -> None:
        self.processors.clear()
        self.has_events = False


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


PART = ProcessorsPart
