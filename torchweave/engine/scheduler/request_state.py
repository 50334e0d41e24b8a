"""Requests of the scheduler: their state from arrival to the last response, the waiting queue, and the slots of running ones."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.image_rows import PromptImages
from torchweave.engine.kv_cache.prefix_index import BlockHashes, PrefixHit
from torchweave.engine.request import FinishReason, InferenceRequest, Output, Response, TokenLogprobs
from torchweave.engine.sampling.beam_search import BeamSearch
from torchweave.engine.sampling.structured_output import Constraint
from torchweave.ops.kernels.sampling.layout import HAS_BAD_WORDS, HAS_BIAS, HAS_COUNTS
from torchweave.ops.slot_state import MAX_STOP_IDS, NOT_EMITTED

MAX_SCORED_TOKENS = 256
"""Most prompt tokens that one step scores for a request: the logits of each are as wide as the vocabulary."""


@dataclass
class RequestState:
    """A request in flight: waiting, running, or paused and waiting again.

    Attributes:
        request: the request as it arrived.
        seed: seed of its random numbers.
        arrival: position in the order of arrival.
        prompt: int32, prompt tokens.
        generated: int32, tokens generated before the last pause.
        stops: stop token ids.
        host_stop_ids: those of `stops` that exceed the device's table and are checked on the host.
        num_logprobs: most likely tokens reported with each generated token; -1: no log-probabilities.
        num_prompt_logprobs: the same for prompt tokens.
        num_sent: generated tokens that were sent before the last pause.
        paused: the request ran before.
        logprobs: log-probabilities of generated tokens, not sent yet.
        reason: why the request finished; None while it runs.
        prompt_logprobs: log-probabilities of prompt tokens from the second on, not sent yet.
        num_scored: prompt positions whose logits were scored.
        error: error message, where `reason` is "error".
        constraint: grammar of the answer; None without structured outputs.
        processed: what each of the host's logits processors keeps of the request; None if none takes it.
        search: state of a beam search; None for all other requests.
        prefix_hit: the last prefix lookup, while the request waits.
        num_cached_tokens: prompt tokens found in the prefix cache when the request started first.
        images: of the prompt; None for a prompt of text.
        rope_delta: what is added to the positions after the prompt.
        adapter: number of the low-rank adapter; 0: none, or it is not loaded.
        adapter_key: of its prefixes.
        pooled: of a request that pools: the row of its last token, or the sum of the rows so far; None: no step has completed.
    """

    request: InferenceRequest
    seed: int
    arrival: int
    prompt: np.ndarray
    stops: tuple[int, ...]
    host_stop_ids: frozenset[int]
    num_logprobs: int
    num_prompt_logprobs: int = -1
    generated: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    num_sent: int = 0
    paused: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_scored: int = 0
    error: str = ""
    constraint: Constraint | None = None
    processed: tuple[Any, ...] | None = None
    search: BeamSearch | None = None
    prefix_hit: PrefixHit | None = None
    num_cached_tokens: int = 0
    images: PromptImages | None = None
    rope_delta: int = 0
    adapter: int = 0
    adapter_key: str = ""
    pooled: np.ndarray | None = None
    _hashes: list[bytes] = field(default_factory=list)
    _block_keys: dict[int, bytes] | None = None

    @classmethod
    def of(
        cls, request: InferenceRequest, seed: int, arrival: int, eos: Sequence[int], vocab_size: int
    ) -> RequestState:
        """The state of a request that arrives.

        Args:
            seed: for a request without a seed.
            eos: end-of-sequence tokens of the model.
        """
        params = request.sampling
        stops = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos))))
        return cls(
            request=request,
            seed=seed if params.seed is None else params.seed,
            arrival=arrival,
            prompt=np.array(request.input_ids, np.int32),  # a copy: the client may reuse its array
            stops=stops,
            host_stop_ids=frozenset(stops[MAX_STOP_IDS:]),
            num_logprobs=params.num_logprobs(vocab_size),
            num_prompt_logprobs=params.num_prompt_logprobs(vocab_size),
        )

    @property
    def prefill(self) -> np.ndarray:
        """Tokens to compute before the next token can be generated."""
        return np.concatenate([self.prompt, self.generated]) if self.generated.size else self.prompt

    @property
    def prefill_len(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def _needs_scoring(self) -> bool:
        """Whether prompt log-probabilities were requested and some are missing."""
        return self.num_prompt_logprobs >= 0 and self.num_scored < len(self.prompt) - 1

    @property
    def host_banned_stops(self) -> frozenset[int]:
        """Stop tokens beyond the slot's table that `min_tokens` bans at first. A grammar's mask excludes them anyway."""
        return self.host_stop_ids if self.request.sampling.min_tokens and self.constraint is None else frozenset()

    @property
    def processor_flags(self) -> int:
        """Flags of the device state that the request's logits processors need; 0 for none."""
        params = self.request.sampling
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        single = any(len(word) == 1 for word in params.bad_words or ())
        sequences = any(len(word) > 1 for word in params.bad_words or ()) or bool(self.host_banned_stops)
        biased = bool(params.logit_bias) or params.allowed_token_ids is not None or single
        return HAS_COUNTS * bool(penalised) | HAS_BIAS * biased | HAS_BAD_WORDS * sequences

    def chunk_size(self, num_tokens: int) -> int:
        """The part of a chunk of `num_tokens` tokens that one step may compute."""
        return min(num_tokens, MAX_SCORED_TOKENS) if self._needs_scoring else num_tokens

    def hashes(self, tokens: np.ndarray, block_size: int) -> BlockHashes:
        """Hashes of the full blocks of `tokens`, a prefix of this request's sequence. Computed hashes are kept."""
        salt = self.adapter_key + self.request.cache_salt
        if self.images is None:
            return BlockHashes(tokens, block_size, salt, self._hashes)
        if self._block_keys is None:
            self._block_keys = self.images.block_keys(block_size)
        return BlockHashes(tokens, block_size, salt, self._hashes, self._block_keys)

    def ended_by_grammar(self) -> bool:
        """Whether the request ends because its grammar is complete or has failed; sets `reason` and `error`."""
        assert self.constraint is not None
        self.error = self.constraint.error
        if self.error or self.constraint.complete:
            self.reason = "error" if self.error else "complete"
        return self.reason is not None

    def response(self, fields: dict[str, Any]) -> Response:
        """The next response, the final one if the request has ended, with these fields of its `Output`."""
        ended = self.reason is not None
        answer = {"finish_reason": self.reason, "num_cached_tokens": self.num_cached_tokens * ended} | fields
        return Response(self.request.id, Output(**answer), ended, self.error)

    def find_prefix(self, kv: BlockManager) -> PrefixHit:
        """Look up the longest cached prefix. It leaves out the last token, and tokens whose logits are still to be scored."""
        prefill = self.prefill if self.search is None else self.prompt  # beams change from step to step
        reusable = min(self.prefill_len - 1, self.num_scored) if self._needs_scoring else self.prefill_len - 1
        self.prefix_hit = kv.match(self.hashes(prefill[:reusable], kv.block_size), self.prefix_hit)
        return self.prefix_hit


class WaitingQueue:
    """Waiting requests by priority, then by arrival. A paused request returns to its original position.

    Requests with a grammar are held back until it is ready; the queue proper, its length and order, is of the others.

    Args:
        priority_order: see `Limits`.

    Attributes:
        entries: the queue proper, as (priority, arrival, request) in order.
        held: requests that are held back, by id.
        only_paused: only requests that ran before may start.
        new_filter: makes a filter of the requests that may start, which is asked in their order; None: all may.
    """

    def __init__(self, priority_order: int = 1) -> None:
        self.held: dict[int, RequestState] = {}
        self._priority_order = priority_order
        self.entries: list[tuple[int, int, RequestState]] = []
        self._ids: set[int] = set()
        self._num_paused = 0
        self.only_paused = False
        self.new_filter: Callable[[], Callable[[RequestState], bool]] | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[RequestState]:
        return (state for _, _, state in self.entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._ids or request_id in self.held

    @property
    def ids(self) -> list[int]:
        """Of all requests, also those that are held back."""
        return [*(state.request.id for state in self), *self.held]

    @property
    def num_paused(self) -> int:
        """Requests that ran before, also those that are held back."""
        return self._num_paused + sum(state.paused for state in self.held.values())

    def add(self, state: RequestState) -> None:
        """Add a request, to those that are held back if it has a grammar."""
        if state.constraint is None:
            self.admit(state)
        else:
            self.held[state.request.id] = state

    def admit(self, state: RequestState) -> None:
        """Add a request that may start."""
        insort(self.entries, (-self._priority_order * state.request.priority, state.arrival, state))
        self._ids.add(state.request.id)
        self._num_paused += state.paused

    @property
    def candidates(self) -> Iterator[RequestState]:
        """Those that may start, the next one first."""
        return (self.entries[index][2] for index in self._candidate_indices())

    def _candidate_indices(self) -> Iterator[int]:
        may_start = None if self.new_filter is None else self.new_filter()
        for index, state in enumerate(self):
            if (state.paused or not self.only_paused) and (may_start is None or may_start(state)):
                yield index

    def pop(self) -> RequestState:
        """Remove and return the first candidate."""
        return self._take(next(self._candidate_indices()))

    def remove(self, request_id: int) -> RequestState | None:
        """Remove and return a request; None if it is not in the queue."""
        if request_id not in self._ids:
            return self.held.pop(request_id, None)
        return self._take(next(i for i, entry in enumerate(self.entries) if entry[2].request.id == request_id))

    def _take(self, index: int) -> RequestState:
        state = self.entries.pop(index)[2]
        self._ids.discard(state.request.id)
        self._num_paused -= state.paused
        return state

    def clear(self) -> None:
        self.held.clear()
        self.entries.clear()
        self._ids.clear()
        self._num_paused = 0


class SlotTable:
    """One entry per slot; a slot is a row of the device's state.

    Attributes:
        state: the request in the slot; None if the slot is free.
        prompt_len: tokens of the prompt.
        prefill_len: tokens of the prompt and of the answer before a pause.
        num_computed: tokens that launched steps have computed. With drafts: at most, until their results are known.
        limit: tokens to compute until the last token is generated.
        num_generated: tokens generated and read back; they are the first in `tokens`.
        num_sent: those of them that were sent.
        ids: request ids.
        prefill_tokens: tokens to compute before the next token can be generated.
        group: first slot of a request with several slots, a `SlotGroup`; -1 for all other requests.
        start_order: start counter; a smaller value started earlier.
        done: further tokens are ignored.
        streaming: each token is sent at once.
        drafting: the slot may have drafts: the device alone decides on its tokens.
        draft_gap: most tokens before the last one that a draft model lacks.
        needs_host_work: each token needs Python: log-probabilities, a grammar, or stop tokens beyond the device's table.
        last_step_index: index of the last step with this slot.
        free: free slots.
        slot_of: first slot of each running request, by request id.
    """

    def __init__(self, size: int) -> None:
        self.state: list[RequestState | None] = [None] * size
        self.prompt_len = np.zeros(size, np.int64)
        self.prefill_len = np.zeros(size, np.int64)
        self.num_computed = np.zeros(size, np.int64)
        self.limit = np.zeros(size, np.int64)
        self.num_generated = np.zeros(size, np.int64)
        self.num_sent = np.zeros(size, np.int64)
        self.ids = np.zeros(size, np.uint64)
        self.prefill_tokens: list[np.ndarray] = [np.empty(0, np.int32)] * size
        self.group = np.full(size, -1, np.int64)
        self.start_order = np.zeros(size, np.int64)
        self.done = np.ones(size, bool)
        self.streaming = np.zeros(size, bool)
        self.drafting = np.zeros(size, bool)
        self.draft_gap = np.zeros(size, np.int64)
        self.needs_host_work = np.zeros(size, bool)
        self.last_step_index = np.full(size, -1, np.int64)
        self.tokens = np.zeros((size, 256), np.int32)
        self.free = list(range(size - 1, -1, -1))
        self.slot_of: dict[int, int] = {}
        self._num_starts = 0

    def allocate(self, state: RequestState, limit: int, num_computed: int) -> int:
        """Give a request a free slot.

        Args:
            limit: tokens to compute until the last token is generated.
            num_computed: tokens that are in the KV cache already.
        """
        slot = self.free.pop()
        generated = state.generated
        self.state[slot] = state
        self.slot_of[state.request.id] = slot
        self.prompt_len[slot] = len(state.prompt)
        self.start_prefill(slot, state.prefill, num_computed)
        self.limit[slot] = limit
        self.grow_tokens(len(generated))
        self.tokens[slot, : len(generated)] = generated
        self.num_generated[slot] = len(generated)
        self.num_sent[slot] = state.num_sent
        self.ids[slot] = state.request.id
        self.start_order[slot] = self._num_starts
        self._num_starts += 1
        self.done[slot] = False
        self.streaming[slot] = state.request.streaming
        has_logprobs = max(state.num_logprobs, state.num_prompt_logprobs) >= 0
        self.needs_host_work[slot] = (
            has_logprobs or state.constraint is not None or state.processed is not None or bool(state.host_stop_ids)
        )
        self.last_step_index[slot] = -1
        return slot

    def start_prefill(self, slot: int, prefill: np.ndarray, num_computed: int) -> None:
        """Set the tokens that a slot prefills, of which the first `num_computed` are in the KV cache."""
        self.prefill_tokens[slot] = prefill
        self.prefill_len[slot] = len(prefill)
        self.num_computed[slot] = num_computed
        self.draft_gap[slot] = 0

    def add_beam(self, leader: int, limit: int) -> int:
        """Give the request whose first slot is `leader` one more slot."""
        slot = self.free.pop()
        self.state[slot] = self.state[leader]
        self.group[slot] = leader
        self.limit[slot] = limit
        self.start_order[slot] = self.start_order[leader]
        self.done[slot] = self.streaming[slot] = False
        self.needs_host_work[slot] = True
        self.last_step_index[slot] = -1
        return slot

    def release(self, slot: int) -> None:
        state = self.state_of(slot)
        if self.slot_of.get(state.request.id) == slot:
            del self.slot_of[state.request.id]
        self.state[slot] = None
        self.group[slot] = -1
        self.done[slot] = True
        self.drafting[slot] = False
        self.free.append(slot)

    def state_of(self, slot: int) -> RequestState:
        state = self.state[slot]
        assert state is not None, "the slot is empty"
        return state

    def pause(self, slot: int) -> None:
        """Enter the tokens so far into the request in a slot, which waits again."""
        state = self.state_of(slot)
        state.paused = True
        state.generated = self.tokens[slot, : int(self.num_generated[slot])].copy()
        state.num_sent = int(self.num_sent[slot])

    def remaining_prefill(self, slot: int) -> int:
        """Tokens to compute before the next token can be generated."""
        return int(self.prefill_len[slot] - self.num_computed[slot])

    def sequence(self, slot: int, num_tokens: int) -> np.ndarray:
        """The first `num_tokens` tokens of prompt and answer, as far as the host has read them back."""
        prompt = self.state_of(slot).prompt
        if num_tokens <= len(prompt):
            return prompt[:num_tokens]
        return np.concatenate([prompt, self.tokens[slot, : num_tokens - len(prompt)]])

    def num_known(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that are certainly computed: no query of a later step is at a position before."""
        known = self.prompt_len[slots] + self.num_generated[slots] - 1
        return np.where(self.drafting[slots], np.minimum(known, self.num_computed[slots]), self.num_computed[slots])

    def append_several(
        self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append the tokens of a step with drafts, rows of `StepResult.tokens`, to the `counts` tokens of each slot.

        Returns:
            The last token of each slot, and the slots that the device has stopped, bool.
        """
        lengths = (tokens != NOT_EMITTED).sum(axis=1)
        last = tokens[np.arange(len(slots)), lengths - 1]
        tokens = np.where(tokens < 0, -1 - tokens, tokens)
        self.grow_tokens(int((counts + lengths).max(initial=0)))
        row, place = np.nonzero(np.arange(tokens.shape[1]) < lengths[:, None])
        self.tokens[slots[row], counts[row] + place] = tokens[row, place]
        self.num_generated[slots] = counts + lengths
        return np.where(last < 0, -1 - last, last), last < 0

    def stopped_on_host(self, slots: np.ndarray, tokens: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Which of `candidates`, bool, sampled a stop token beyond the device's table; bool."""
        stopped = np.zeros(len(slots), bool)
        for i in np.flatnonzero(candidates):
            state = self.state_of(int(slots[i]))
            if int(tokens[i]) in state.host_stop_ids:
                stopped[i] = int(self.num_generated[slots[i]]) > state.request.sampling.min_tokens
        return stopped

    def unsent(self, slot: int) -> np.ndarray:
        """The tokens that were not sent yet, which count as sent from here on."""
        num_generated = int(self.num_generated[slot])
        tokens = self.tokens[slot, int(self.num_sent[slot]) : num_generated].copy()
        self.num_sent[slot] = num_generated
        return tokens

    def grow_tokens(self, num_tokens: int) -> None:
        """Make room for `num_tokens` generated tokens per slot."""
        while num_tokens > self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, self.tokens.shape[1])))
