"""Which replica gets a request: the one that has the least left to do once it has it.

Work is counted in prompt tokens that are to be read. A replica has those that it was given and has not read, and `REQUEST_TOKENS`
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

from torchweave.serving.ipc.shared_load import Ledger

REQUEST_TOKENS = 256
"""Prompt tokens that cost an engine as much to read as it costs to make one more answer beside others (decision 0094)."""
SPAN = 64
"""Tokens of a prompt that are known as one; a shorter beginning is nobody's."""
_TURN = 1 << 30  # more than there are replicas


@dataclass(frozen=True)
class Load:
    """What a replica has to do.

    Attributes:
        replica: its number.
        life: counts the lives of its engine; a new one has an empty cache.
        num_requests: requests that it has not answered to their end.
        unread: prompt tokens of those that it has not read.
        is_full: its next step has no room for a further request.
        cache_tokens: what its KV cache holds.
    """

    replica: int
    life: int
    num_requests: int
    unread: int
    is_full: bool
    cache_tokens: int

    @property
    def work(self) -> int:
        return self.unread + REQUEST_TOKENS * self.num_requests


@dataclass(frozen=True)
class Sent:
    """A prompt went to a replica: its `life`, the prompt's spans, and how many of them the replica keeps."""

    replica: int
    life: int
    spans: list[int]
    room: int


class Router:
    """Remembers which beginnings of prompts went to which replica.

    Args:
        prefixes: whether engines keep what they have read; else no replica is better for a prompt than another.
        announce: called with each prompt that goes to one, for the routers of other processes to `learn`.
        ledger: what the routers of other processes see too: whose turn it is.
    """

    def __init__(
        self,
        prefixes: bool = True,
        announce: Callable[[Sent], None] = lambda _: None,
        ledger: Ledger | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._announce = announce
        self._ledger = ledger or Ledger()
        self._read: dict[int, Beginnings] = {}

    def choose(self, prompt: np.ndarray, cache_salt: str, loads: Sequence[Load]) -> tuple[int, int]:
        """The replica for a prompt, and how many tokens of the prompt it has read before; the prompt counts as sent there.

        Args:
            prompt: token ids, int32.
            cache_salt: requests with different ones share nothing.
            loads: of the replicas that take requests; at least one. Those that are alike take turns.
        """
        spans = spans_of(prompt, cache_salt) if self._prefixes else []
        known = [self._beginnings(load.replica, load.life).longest(spans) * SPAN for load in loads]
        last = self._ledger.last

        def left(number: int) -> tuple[bool, int, int, int]:
            load = loads[number]
            turn = (load.replica - last - 1) % _TURN
            return load.is_full, load.work - known[number], load.num_requests, turn

        best = min(range(len(loads)), key=left)
        chosen = self._ledger.last = loads[best].replica
        if spans:
            sent = Sent(chosen, loads[best].life, spans, loads[best].cache_tokens // SPAN)
            self.learn(sent)
            self._announce(sent)
        return chosen, known[best]

    def learn(self, sent: Sent) -> None:
        """A prompt went to a replica."""
        self._beginnings(sent.replica, sent.life).add(sent.spans, sent.room)

    def _beginnings(self, replica: int, life: int) -> Beginnings:
        found = self._read.get(replica)
        if found is None or found.life != life:
            found = self._read[replica] = Beginnings(life)
        return found


class Beginnings:
    """What one life of an engine has read, span by span: as much as its cache holds, what was asked for last."""

    def __init__(self, life: int) -> None:
        self.life = life
        self._spans: OrderedDict[int, None] = OrderedDict()

    def longest(self, spans: Sequence[int]) -> int:
        """How many of a prompt's first spans are there."""
        return next((number for number, span in enumerate(spans) if span not in self._spans), len(spans))

    def add(self, spans: Sequence[int], room: int) -> None:
        for span in reversed(spans):  # a beginning is forgotten after what follows it
            self._spans[span] = None
            self._spans.move_to_end(span)
        while len(self._spans) > room:
            self._spans.popitem(last=False)


def spans_of(prompt: np.ndarray, cache_salt: str) -> list[int]:
    """A number for each beginning of a prompt that is a multiple of `SPAN` tokens long: the same in every process."""
    salt = blake2b(cache_salt.encode(errors="surrogatepass")).digest()
    found, digest = [], blake2b(salt, digest_size=8)
    for end in range(SPAN, len(prompt) + 1, SPAN):
        digest.update(prompt[end - SPAN : end].tobytes())
        found.append(int.from_bytes(digest.digest()))
    return found
