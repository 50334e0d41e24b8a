"""Requests as the batch keeps them, from arrival to the last response, and the queue of those that wait."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from torchweave.engine.kv_cache.prefix_index import BlockHashes, PrefixHit
from torchweave.engine.request import FinishReason, InferenceRequest, TokenLogprobs
from torchweave.engine.sampling.beam_search import BeamSearch
from torchweave.engine.sampling.structured_output import Constraint


@dataclass
class RequestState:
    """A request that is in flight: it waits, runs, or was paused and waits again.

    Attributes:
        request: as it came.
        seed: of its random numbers.
        arrival: counts requests in the order in which they came.
        prompt: int32, its tokens.
        generated: int32, tokens that were generated before it was last paused.
        stops: tokens that end it.
        host_stop_ids: of these, what the device has no room for.
        num_logprobs: most likely tokens wanted with each token; -1 for none at all.
        num_prompt_logprobs: the same for the tokens of the prompt.
        num_sent: of these, tokens that were told already.
        paused: it ran before.
        reason: why it ended, once it has.
        logprobs: of tokens that were not told yet.
        prompt_logprobs: of the prompt's tokens but the first, as far as they were not told yet.
        prompt_targets: positions of the prompt whose logits were looked at.
        error: what went wrong, where that was the reason.
        constraint: its grammar, where it asked for a form.
        search: what a beam search has found; None for all other requests.
        match: what was last found of its beginning in the KV cache, while it waits.
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
    prompt_targets: int = 0
    error: str = ""
    constraint: Constraint | None = None
    search: BeamSearch | None = None
    match: PrefixHit | None = None
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def prefill(self) -> np.ndarray:
        """What has to be read before the next token can be generated."""
        return np.concatenate([self.prompt, self.generated]) if self.generated.size else self.prompt

    @property
    def prefill_len(self) -> int:
        return len(self.prompt) + len(self.generated)

    def hashes(self, tokens: np.ndarray, block_size: int) -> BlockHashes:
        """Hashes of the full blocks of `tokens`, the beginning of this request's sequence; what was hashed is kept."""
        return BlockHashes(tokens, block_size, self.request.cache_salt, self._hashes)


class WaitingQueue:
    """Requests that wait: higher priority first, then in order of arrival. A paused one takes its old place again."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, RequestState]] = []
        self._ids: set[int] = set()
        self.num_paused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestState]:
        return (state for _, _, state in self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._ids

    def add(self, state: RequestState) -> None:
        insort(self._entries, (-state.request.priority, state.arrival, state))
        self._ids.add(state.request.id)
        self.num_paused += state.paused

    def pop(self) -> RequestState:
        """The first."""
        return self._take(0)

    def remove(self, request_id: int) -> RequestState | None:
        """Take a request out; None when it is not there."""
        if request_id not in self._ids:
            return None
        return self._take(next(i for i, entry in enumerate(self._entries) if entry[2].request.id == request_id))

    def _take(self, index: int) -> RequestState:
        state = self._entries.pop(index)[2]
        self._ids.discard(state.request.id)
        self.num_paused -= state.paused
        return state

    def clear(self) -> None:
        self._entries.clear()
        self._ids.clear()
        self.num_paused = 0
