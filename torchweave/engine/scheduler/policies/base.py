"""Input and output of a capacity policy: plain values, so that a policy can be simulated without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DecodeRequests:
    """Decode requests, one entry each. A request takes one token per step, a beam search one per beam.

    Attributes:
        blocks_needed: blocks that the request needs for its next step.
        held_blocks: lower bound of the blocks that are freed if only this request is paused.
        start_order: smaller for an earlier start.
        rows: tokens in this step, 0 for a search whose last result is pending; None: 1 each.
        width: most tokens in a step; None: 1 each.
    """

    blocks_needed: np.ndarray = field(default_factory=lambda: _EMPTY)
    held_blocks: np.ndarray = field(default_factory=lambda: _EMPTY)
    start_order: np.ndarray = field(default_factory=lambda: _EMPTY)
    rows: np.ndarray | None = None
    width: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.blocks_needed)

    @property
    def num_tokens(self) -> int:
        return len(self) if self.rows is None else int(self.rows.sum())

    @property
    def num_slots(self) -> int:
        return len(self) if self.width is None else int(self.width.sum())


@dataclass(frozen=True)
class PrefillRequest:
    """A running request in prefill.

    Attributes:
        remaining_tokens: prompt tokens left to prefill.
        allocated_tokens: those of them that fit into the request's blocks.
        held_blocks, start_order: as in `DecodeRequests`.
    """

    remaining_tokens: int
    allocated_tokens: int = 0
    held_blocks: int = 0
    start_order: int = 0


@dataclass(frozen=True)
class WaitingRequest:
    """A request without blocks: new or paused.

    Attributes:
        remaining_tokens: tokens to prefill, without the cached prefix.
        max_blocks: most free blocks that it takes until its end.
        hit_blocks: those of them that hold its cached prefix and are taken at its start.
    """

    remaining_tokens: int
    max_blocks: int
    hit_blocks: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The state of the engine before a step.

    Attributes:
        max_num_tokens: most tokens in the step.
        free_slots: slots for waiting requests.
        used_slots: requests that run or have their last step in flight.
        block_size: tokens per block.
        free_blocks: blocks that can be granted now.
        unreserved_blocks: those of them that no running request may need.
        pending_free_blocks: blocks that are freed when the steps in flight have completed.
        decode, prefill: running requests; prefill requests oldest first.
        waiting: waiting requests that have slots, in the order of their start. The cost of reading an entry grows with the
            request's cached prefix, so read no further than necessary.
        chunked_context: a prompt may be split over several steps.
        equal_progress: prompts that do not fit together each advance by a part; else the oldest is first.
        mixed_step_sizes: see `step_token_budget`.
    """

    max_num_tokens: int
    free_slots: int
    block_size: int
    free_blocks: int
    unreserved_blocks: int
    pending_free_blocks: int = 0
    used_slots: int = 0
    decode: DecodeRequests = field(default_factory=DecodeRequests)
    prefill: tuple[PrefillRequest, ...] = ()
    waiting: Sequence[WaitingRequest] = ()
    chunked_context: bool = True
    equal_progress: bool = False
    mixed_step_sizes: tuple[int, ...] = ()

    @property
    def num_next_blocks(self) -> int:
        """Blocks that the running requests need sooner or later: one for each token of a step."""
        return self.decode.num_slots + len(self.prefill)


@dataclass(frozen=True)
class Decision:
    """The content of a step.

    Attributes:
        chunks: prompt tokens of each running prefill request, in the snapshot's order.
        admitted: the same for the first `len(admitted)` waiting requests, which start.
        skipped: indices of decode requests that skip this step, because a block they need is not free yet.
        paused: indices of running requests, decode before prefill, that free all blocks and wait.
    """

    chunks: tuple[int, ...]
    admitted: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()


Policy = Callable[[Snapshot], Decision]
