"""What the host knows of the running requests: arrays over slots."""

from __future__ import annotations

import numpy as np

from torchweave.engine.scheduler.request_state import Active


class Slots:
    """One entry a slot; a slot is a row of the device's state.

    Attributes:
        active: the request that runs there.
        prompt_len: tokens of its prompt.
        context_len: the prompt, and what had been generated before a pause.
        computed: tokens that launched steps have read.
        limit: tokens to read until the last one is generated.
        count: tokens generated and read back, in the first places of `tokens`.
        sent: of these, tokens that were told already.
        ids: the request's id.
        contexts: tokens to read before the next one can be generated.
        group: the slot that the request of a beam search is known by; -1 for all others.
        started: counts starts, so that a smaller one ran earlier.
        done: no more of its tokens count.
        streaming: it is told of every token.
        special: it needs Python with every token: log-probabilities, a grammar, or more stop tokens than the device holds.
        last_named: index of the last step that names it.
    """

    def __init__(self, size: int) -> None:
        self.active: list[Active | None] = [None] * size
        self.prompt_len = np.zeros(size, np.int64)
        self.context_len = np.zeros(size, np.int64)
        self.computed = np.zeros(size, np.int64)
        self.limit = np.zeros(size, np.int64)
        self.count = np.zeros(size, np.int64)
        self.sent = np.zeros(size, np.int64)
        self.ids = np.zeros(size, np.uint64)
        self.contexts: list[np.ndarray] = [np.empty(0, np.int32)] * size
        self.group = np.full(size, -1, np.int64)
        self.started = np.zeros(size, np.int64)
        self.done = np.ones(size, bool)
        self.streaming = np.zeros(size, bool)
        self.special = np.zeros(size, bool)
        self.last_named = np.full(size, -1, np.int64)
        self.tokens = np.zeros((size, 256), np.int32)
        self.free = list(range(size - 1, -1, -1))
        self.of: dict[int, int] = {}
        self._starts = 0

    def occupy(self, active: Active, limit: int, computed: int) -> int:
        """A free slot for a request of which `computed` tokens need not be read, and which ends after `limit`."""
        slot = self.free.pop()
        generated = active.generated
        self.active[slot] = active
        self.of[active.request.id] = slot
        self.prompt_len[slot] = len(active.prompt)
        self.begin(slot, active.context, computed)
        self.limit[slot] = limit
        self.make_room(len(generated))
        self.tokens[slot, : len(generated)] = generated
        self.count[slot] = len(generated)
        self.sent[slot] = active.sent
        self.ids[slot] = active.request.id
        self.started[slot] = self._starts
        self._starts += 1
        self.done[slot] = False
        self.streaming[slot] = active.request.streaming
        asks = max(active.num_logprobs, active.num_prompt_logprobs) >= 0 or active.constraint is not None
        self.special[slot] = asks or bool(active.late_stops)
        self.last_named[slot] = -1
        return slot

    def begin(self, slot: int, context: np.ndarray, computed: int) -> None:
        """A slot is to read `context`, of which `computed` tokens need not be read."""
        self.contexts[slot] = context
        self.context_len[slot] = len(context)
        self.computed[slot] = computed

    def join(self, leader: int, limit: int) -> int:
        """One more slot for the request that is known by `leader`."""
        slot = self.free.pop()
        self.active[slot] = self.active[leader]
        self.group[slot] = leader
        self.limit[slot] = limit
        self.started[slot] = self.started[leader]
        self.done[slot] = self.streaming[slot] = False
        self.special[slot] = True
        self.last_named[slot] = -1
        return slot

    def vacate(self, slot: int) -> None:
        active = self.request_in(slot)
        if self.of.get(active.request.id) == slot:
            del self.of[active.request.id]
        self.active[slot] = None
        self.group[slot] = -1
        self.done[slot] = True
        self.free.append(slot)

    def request_in(self, slot: int) -> Active:
        active = self.active[slot]
        assert active is not None, "the slot is empty"
        return active

    def context_left(self, slot: int) -> int:
        """Tokens that have to be read before the next one can be generated."""
        return int(self.context_len[slot] - self.computed[slot])

    def sequence(self, slot: int, num_tokens: int) -> np.ndarray:
        """The first tokens of a slot's request, prompt and answer, as far as they are known on the host."""
        prompt = self.request_in(slot).prompt
        if num_tokens <= len(prompt):
            return prompt[:num_tokens]
        return np.concatenate([prompt, self.tokens[slot, : num_tokens - len(prompt)]])

    def make_room(self, num_tokens: int) -> None:
        """Let `tokens` hold as many tokens a slot."""
        while num_tokens > self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, self.tokens.shape[1])))
