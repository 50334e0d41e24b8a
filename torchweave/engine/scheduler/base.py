"""What a capacity policy sees and what it answers: plain values, so that a policy is simulated without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A request that holds nothing yet."""

    prompt_tokens: int
    max_blocks: int  # of the KV cache, held at its very end


@dataclass(frozen=True)
class Snapshot:
    """The state of the engine before a step.

    Attributes:
        max_num_tokens: tokens that the step may hold.
        free_slots: requests that may join the running ones.
        unreserved_blocks: blocks of the KV cache that no running request may come to need.
        num_generation: running requests that take one token each.
        context: prompt tokens that each running context request has still to read, oldest first.
        waiting: requests that wait, oldest first.
        chunked_context: a prompt may be read in several steps.
    """

    max_num_tokens: int
    free_slots: int
    unreserved_blocks: int
    num_generation: int
    context: tuple[int, ...]
    waiting: tuple[Waiting, ...]
    chunked_context: bool = True


@dataclass(frozen=True)
class Decision:
    """What the step holds beside the generation requests.

    Attributes:
        chunks: prompt tokens to read in this step by each running context request, in the snapshot's order.
        admitted: the same for the first `len(admitted)` waiting requests, which start to run.
    """

    chunks: tuple[int, ...]
    admitted: tuple[int, ...]


Policy = Callable[[Snapshot], Decision]
