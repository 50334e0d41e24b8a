"""Host-side state of the running requests: arrays over slots."""

from __future__ import annotations

import numpy as np

from torchweave.engine.scheduler.request_state import RequestState


class SlotTable:
    """One entry per slot; a slot is a row of the device's state.

    Attributes:
        state: the request in the slot; None if the slot is free.
        prompt_len: tokens of the prompt.
        prefill_len: tokens of the prompt and of the answer before a pause.
        num_computed: tokens that launched steps have computed.
        limit: tokens to compute until the last token is generated.
        num_generated: tokens generated and read back; they are the first in `tokens`.
        num_sent: those of them that were sent.
        ids: request ids.
        prefill_tokens: tokens to compute before the next token can be generated.
        group: first slot of the beam search that the slot belongs to; -1 for all other requests.
        start_order: start counter; a smaller value started earlier.
        done: further tokens are ignored.
        streaming: each token is sent at once.
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
        self.needs_host_work[slot] = has_logprobs or state.constraint is not None or bool(state.host_stop_ids)
        self.last_step_index[slot] = -1
        return slot

    def start_prefill(self, slot: int, prefill: np.ndarray, num_computed: int) -> None:
        """Set the tokens that a slot prefills, of which the first `num_computed` are in the KV cache."""
        self.prefill_tokens[slot] = prefill
        self.prefill_len[slot] = len(prefill)
        self.num_computed[slot] = num_computed

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
        self.free.append(slot)

    def state_of(self, slot: int) -> RequestState:
        state = self.state[slot]
        assert state is not None, "the slot is empty"
        return state

    def remaining_prefill(self, slot: int) -> int:
        """Tokens to compute before the next token can be generated."""
        return int(self.prefill_len[slot] - self.num_computed[slot])

    def sequence(self, slot: int, num_tokens: int) -> np.ndarray:
        """The first `num_tokens` tokens of prompt and answer, as far as the host has read them back."""
        prompt = self.state_of(slot).prompt
        if num_tokens <= len(prompt):
            return prompt[:num_tokens]
        return np.concatenate([prompt, self.tokens[slot, : num_tokens - len(prompt)]])

    def grow_tokens(self, num_tokens: int) -> None:
        """Make room for `num_tokens` generated tokens per slot."""
        while num_tokens > self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, self.tokens.shape[1])))
