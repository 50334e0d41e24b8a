"""State of a request from arrival to its last response, and the queue of waiting requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.prefix_index import BlockHashes, PrefixHit
from torchweave.engine.request import FinishReason, InferenceRequest, TokenLogprobs
from torchweave.engine.sampling.beam_search import BeamSearch
from torchweave.engine.sampling.structured_output import Constraint

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
        search: state of a beam search; None for all other requests.
        prefix_hit: the last prefix lookup, while the request waits.
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
    search: BeamSearch | None = None
    prefix_hit: PrefixHit | None = None
    _hashes: list[bytes] = field(default_factory=list)

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

    def chunk_size(self, num_tokens: int) -> int:
        """The part of a chunk of `num_tokens` tokens that one step may compute."""
        return min(num_tokens, MAX_SCORED_TOKENS) if self._needs_scoring else num_tokens

    def hashes(self, tokens: np.ndarray, block_size: int) -> BlockHashes:
        """Hashes of the full blocks of `tokens`, a prefix of this request's sequence. Computed hashes are kept."""
        return BlockHashes(tokens, block_size, self.request.cache_salt, self._hashes)

    def find_prefix(self, kv: BlockManager) -> PrefixHit:
        """Look up the longest cached prefix. It leaves out the last token, and tokens whose logits are still to be scored."""
        prefill = self.prefill if self.search is None else self.prompt  # beams change from step to step
        reusable = min(self.prefill_len - 1, self.num_scored) if self._needs_scoring else self.prefill_len - 1
        self.prefix_hit = kv.match(self.hashes(prefill[:reusable], kv.block_size), self.prefix_hit)
        return self.prefix_hit


class WaitingQueue:
    """Waiting requests by priority, then by arrival. A paused request returns to its original position."""

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
        """Remove and return the first request."""
        return self._take(0)

    def remove(self, request_id: int) -> RequestState | None:
        """Remove and return a request; None if it is not in the queue."""
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
