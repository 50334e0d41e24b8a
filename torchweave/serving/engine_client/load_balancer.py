"""Prefix-aware load balancing: a request goes to the replica with the least remaining work, the request included.

Work is measured in prompt tokens to prefill. A replica's work is its pending prompt tokens plus `REQUEST_COST` for each of its
requests; a request adds its prompt minus the prefix that the replica probably has cached. A conversation therefore stays on its
replica until that one is busier than another by more than the prefill of the conversation. Replicas with room in the next step
take precedence over full ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from torchweave.serving.ipc.messages import PromptRouted
from torchweave.serving.ipc.shared_load import SharedLoad

REQUEST_COST = 256
"""Prompt tokens whose prefill costs as much as the decode of one more request in a batch (decision 0094)."""
PREFIX_CHUNK = 64
"""Tokens covered by one prefix hash; shorter prefixes are not tracked."""
_ROUND_ROBIN_MODULUS = 1 << 30  # larger than the number of replicas


@dataclass(frozen=True)
class Load:
    """Load of a replica.

    Attributes:
        replica: its number.
        num_restarts: restarts of its engine; the cache is empty after a restart.
        num_requests: unfinished requests.
        pending_prefill_tokens: prompt tokens that are not prefilled.
        is_full: the next step has no room for a further request.
        cache_tokens: capacity of the KV cache.
    """

    replica: int
    num_restarts: int
    num_requests: int
    pending_prefill_tokens: int
    is_full: bool
    cache_tokens: int

    @property
    def work(self) -> int:
        return self.pending_prefill_tokens + REQUEST_COST * self.num_requests


class LoadBalancer:
    """Chooses replicas by load and by the prompt prefixes that were sent to them.

    Args:
        prefixes: whether the engines cache prefixes; otherwise only the load decides.
        announce: called with each routed prompt, for `on_prompt_routed` of the other HTTP processes.
        shared_load: holds the round-robin position of all HTTP processes.
    """

    def __init__(
        self,
        prefixes: bool = True,
        announce: Callable[[PromptRouted], None] = lambda _: None,
        shared_load: SharedLoad | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._announce = announce
        self._shared_load = shared_load or SharedLoad()
        self._prefix_histories: dict[int, PrefixHistory] = {}

    def choose(self, prompt: np.ndarray, cache_salt: str, loads: Sequence[Load]) -> tuple[int, int]:
        """Choose a replica for a prompt and record the prompt there.

        Args:
            prompt: token ids, int32.
            cache_salt: requests with different salts share no prefixes.
            loads: of the ready replicas, at least one. Replicas with equal loads take turns.

        Returns:
            The replica's number, and the prompt tokens that it probably has cached.
        """
        prefix_hashes = hash_prefixes(prompt, cache_salt) if self._prefixes else []
        num_cached = [
            self._prefix_history(load.replica, load.num_restarts).num_matching(prefix_hashes) * PREFIX_CHUNK
            for load in loads
        ]
        last = self._shared_load.last

        def remaining_work(number: int) -> tuple[bool, int, int, int]:
            load = loads[number]
            round_robin = (load.replica - last - 1) % _ROUND_ROBIN_MODULUS
            return load.is_full, load.work - num_cached[number], load.num_requests, round_robin

        best = min(range(len(loads)), key=remaining_work)
        chosen = self._shared_load.last = loads[best].replica
        if prefix_hashes:
            routed = PromptRouted(
                chosen, loads[best].num_restarts, prefix_hashes, loads[best].cache_tokens // PREFIX_CHUNK
            )
            self.on_prompt_routed(routed)
            self._announce(routed)
        return chosen, num_cached[best]

    def clear_histories(self, replicas: Sequence[int]) -> None:
        """Forget the prompts that were sent to these replicas: their prefix caches are empty."""
        for replica in replicas:
            self._prefix_histories.pop(replica, None)

    def on_prompt_routed(self, routed: PromptRouted) -> None:
        """Record a prompt in its replica's history."""
        self._prefix_history(routed.replica, routed.num_restarts).add(routed.prefix_hashes, routed.capacity)

    def _prefix_history(self, replica: int, num_restarts: int) -> PrefixHistory:
        history = self._prefix_histories.get(replica)
        if history is None or history.num_restarts != num_restarts:
            history = self._prefix_histories[replica] = PrefixHistory(num_restarts)
        return history


class PrefixHistory:
    """Prefix hashes of the prompts of one engine process in LRU order, as many as its cache holds."""

    def __init__(self, num_restarts: int) -> None:
        self.num_restarts = num_restarts
        self._prefix_hashes: OrderedDict[int, None] = OrderedDict()

    def num_matching(self, prefix_hashes: Sequence[int]) -> int:
        """Number of leading prefixes of a prompt in the history."""
        return next(
            (number for number, prefix_hash in enumerate(prefix_hashes) if prefix_hash not in self._prefix_hashes),
            len(prefix_hashes),
        )

    def add(self, prefix_hashes: Sequence[int], capacity: int) -> None:
        for prefix_hash in reversed(prefix_hashes):  # shorter prefixes are evicted after the longer ones
            self._prefix_hashes[prefix_hash] = None
            self._prefix_hashes.move_to_end(prefix_hash)
        while len(self._prefix_hashes) > capacity:
            self._prefix_hashes.popitem(last=False)


def hash_prefixes(prompt: np.ndarray, cache_salt: str) -> list[int]:
    """Hash each prefix whose length is a multiple of `PREFIX_CHUNK` tokens; equal in every process."""
    salt = blake2b(cache_salt.encode(errors="surrogatepass")).digest()
    hashes, digest = [], blake2b(salt, digest_size=8)
    for end in range(PREFIX_CHUNK, len(prompt) + 1, PREFIX_CHUNK):
        digest.update(prompt[end - PREFIX_CHUNK : end].tobytes())
        hashes.append(int.from_bytes(digest.digest()))
    return hashes
