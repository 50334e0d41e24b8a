"""What the host knows of the running requests: arrays over slots."""

from __future__ import annotations

import numpy as np

from torchweave.engine.scheduler.request_state import RequestState


class SlotTable:
    """One entry a slot; a slot is a row of the device's state.

    Attributes:
        state: the request that runs there.
        prompt_len: tokens of its prompt.
        prefill_len: the prompt, and what had been generated before a pause.
        num_computed: tokens that launched steps have read.
        limit: tokens to read until the last one is generated.
        num_generated: tokens generated and read back, in the first places of `tokens`.
        num_sent: of these, tokens that were told already.
        ids: the request's id.
        prefill_tokens: tokens to read before the next one can be generated.
        group: the slot that the request of a beam search is known by; -1 for all others.
        start_order: counts starts, so that a smaller one ran earlier.
        done: no more of its tokens count.
        streaming: it is told of every token.
        needs_host_work: it needs Python with every token: log-probabilities, a grammar, or more stop tokens than the device holds.
        last_step_index: index of the last step that names it.
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
        self.needs_host_work = np.zeros(size, bool)
        self.last_step_index = np.full(size, -1, np.int64)
        self.tokens = np.zeros((size, 256), np.int32)
        self.free = list(range(size - 1, -1, -1))
        self.of: dict[int, int] = {}
        self._num_starts = 0

    def allocate(self, state: RequestState, limit: int, num_computed: int) -> int:
        """A free slot for a request of which `num_computed` tokens need not be read, and which ends after `limit`."""
        slot = self.free.pop()
        generated = state.generated
        self.state[slot] = state
        self.of[state.request.id] = slot
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
        asks = max(state.num_logprobs, state.num_prompt_logprobs) >= 0 or state.constraint is not None
        self.needs_host_work[slot] = asks or bool(state.host_stop_ids)
        self.last_step_index[slot] = -1
        return slot

    def start_prefill(self, slot: int, prefill: np.ndarray, num_computed: int) -> None:
        """A slot is to read `prefill`, of which `num_computed` tokens need not be read."""
        self.prefill_tokens[slot] = prefill
        self.prefill_len[slot] = len(prefill)
        self.num_computed[slot] = num_computed

    def add_beam(self, leader: int, limit: int) -> int:
        """One more slot for the request that is known by `leader`."""
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
        if self.of.get(state.request.id) == slot:
            del self.of[state.request.id]
        self.state[slot] = None
        self.group[slot] = -1
        self.done[slot] = True
        self.free.append(slot)

    def state_of(self, slot: int) -> RequestState:
        state = self.state[slot]
        assert state is not None, "the slot is empty"
        return state

    def remaining_prefill(self, slot: int) -> int:
        """Tokens that have to be read before the next one can be generated."""
        return int(self.prefill_len[slot] - self.num_computed[slot])

    def sequence(self, slot: int, num_tokens: int) -> np.ndarray:
        """The first tokens of a slot's request, prompt and answer, as far as they are known on the host."""
        prompt = self.state_of(slot).prompt
        if num_tokens <= len(prompt):
            return prompt[:num_tokens]
        return np.concatenate([prompt, self.tokens[slot, : num_tokens - len(prompt)]])

    def grow_tokens(self, num_tokens: int) -> None:
        """Let `tokens` hold as many tokens a slot."""
        while num_tokens > self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, self.tokens.shape[1])))
