"""Which replica gets a request: the one that has the least left to do once it has it.

Work is counted in prompt tokens that are to be read. A replica has those that it was given and has not read, and `REQUEST_COST`
for each of its requests; a request adds its prompt, less what the replica has read of it before and probably keeps. So a
conversation stays where its beginning is, until that replica is busier than another by more than reading it again would cost.
One whose next step has room comes before one whose requests wait for others to end.
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
"""Prompt tokens that cost an engine as much to read as it costs to make one more answer beside others (decision 0094)."""
PREFIX_CHUNK = 64
"""Tokens of a prompt that are known as one; a shorter beginning is nobody's."""
_ROUND_ROBIN_MODULUS = 1 << 30  # more than there are replicas


@dataclass(frozen=True)
class Load:
    """What a replica has to do.

    Attributes:
        replica: its number.
        incarnation: counts the lives of its engine; a new one has an empty cache.
        num_requests: requests that it has not answered to their end.
        pending_prefill_tokens: prompt tokens of those that it has not read.
        is_full: its next step has no room for a further request.
        cache_tokens: what its KV cache holds.
    """

    replica: int
    incarnation: int
    num_requests: int
    pending_prefill_tokens: int
    is_full: bool
    cache_tokens: int

    @property
    def work(self) -> int:
        return self.pending_prefill_tokens + REQUEST_COST * self.num_requests


class LoadBalancer:
    """Remembers which beginnings of prompts went to which replica.

    Args:
        prefixes: whether engines keep what they have read; else no replica is better for a prompt than another.
        announce: called with each prompt that goes to one, for the routers of other processes to `on_prompt_routed`.
        shared_load: what the routers of other processes see too: whose turn it is.
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
        """The replica for a prompt, and how many tokens of the prompt it has read before; the prompt counts as sent there.

        Args:
            prompt: token ids, int32.
            cache_salt: requests with different ones share nothing.
            loads: of the replicas that take requests; at least one. Those that are alike take turns.
        """
        prefix_hashes = hash_prefixes(prompt, cache_salt) if self._prefixes else []
        num_cached = [
            self._prefix_history(load.replica, load.incarnation).num_matching(prefix_hashes) * PREFIX_CHUNK
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
                chosen, loads[best].incarnation, prefix_hashes, loads[best].cache_tokens // PREFIX_CHUNK
            )
            self.on_prompt_routed(routed)
            self._announce(routed)
        return chosen, num_cached[best]

    def on_prompt_routed(self, routed: PromptRouted) -> None:
        """A prompt went to a replica."""
        self._prefix_history(routed.replica, routed.incarnation).add(routed.prefix_hashes, routed.capacity)

    def _prefix_history(self, replica: int, incarnation: int) -> PrefixHistory:
        found = self._prefix_histories.get(replica)
        if found is None or found.incarnation != incarnation:
            found = self._prefix_histories[replica] = PrefixHistory(incarnation)
        return found


class PrefixHistory:
    """What one life of an engine has read, span by span: as much as its cache holds, what was asked for last."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._prefix_hashes: OrderedDict[int, None] = OrderedDict()

    def num_matching(self, prefix_hashes: Sequence[int]) -> int:
        """How many of a prompt's first spans are there."""
        return next(
            (number for number, prefix_hash in enumerate(prefix_hashes) if prefix_hash not in self._prefix_hashes),
            len(prefix_hashes),
        )

    def add(self, prefix_hashes: Sequence[int], capacity: int) -> None:
        for prefix_hash in reversed(prefix_hashes):  # a beginning is forgotten after what follows it
            self._prefix_hashes[prefix_hash] = None
            self._prefix_hashes.move_to_end(prefix_hash)
        while len(self._prefix_hashes) > capacity:
            self._prefix_hashes.popitem(last=False)


def hash_prefixes(prompt: np.ndarray, cache_salt: str) -> list[int]:
    """A number for each beginning of a prompt that is a multiple of `PREFIX_CHUNK` tokens long: the same in every process."""
    salt = blake2b(cache_salt.encode(errors="surrogatepass")).digest()
    found, digest = [], blake2b(salt, digest_size=8)
    for end in range(PREFIX_CHUNK, len(prompt) + 1, PREFIX_CHUNK):
        digest.update(prompt[end - PREFIX_CHUNK : end].tobytes())
        found.append(int.from_bytes(digest.digest()))
    return found
