"""What a capacity policy sees and what it answers: plain values, so that a policy is simulated without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DecodeRequests:
    """Running requests that take a token each, or one for each of their beams; one entry a request.

    Attributes:
        blocks_needed: blocks that the request needs for its next step.
        held_blocks: blocks that would come free if it alone were paused; never more than that.
        start_order: smaller for those that started earlier.
        rows: tokens that it takes in this step, 0 while it waits for what an earlier step found; None: 1 each.
        width: tokens that it takes in any step; None: 1 each.
    """

    blocks_needed: np.ndarray = field(default_factory=lambda: NONE)
    held_blocks: np.ndarray = field(default_factory=lambda: NONE)
    start_order: np.ndarray = field(default_factory=lambda: NONE)
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
    """A running request whose prompt is still being read.

    Attributes:
        remaining_tokens: tokens still to read.
        allocated_tokens: of these, how many fit into the blocks that it holds.
        held_blocks, start_order: as in `DecodeRequests`.
    """

    remaining_tokens: int
    allocated_tokens: int = 0
    held_blocks: int = 0
    start_order: int = 0


@dataclass(frozen=True)
class WaitingRequest:
    """A request that holds nothing yet, or nothing any more.

    Attributes:
        remaining_tokens: tokens to read, without those whose blocks are known.
        max_blocks: free blocks that it takes up to its very end.
        hit_blocks: of these, blocks that it takes at once because they hold the beginning of its prompt.
    """

    remaining_tokens: int
    max_blocks: int
    hit_blocks: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The state of the engine before a step.

    Attributes:
        max_num_tokens: tokens that the step may hold.
        free_slots: slots for requests that may join the running ones.
        used_slots: requests that run, or have their last step in flight.
        block_size: tokens in a block.
        free_blocks: blocks that can be granted now.
        unreserved_blocks: of these, what no running request may come to need.
        pending_free_blocks: blocks that come free when the steps in flight have completed.
        decode, prefill: running requests; context requests oldest first.
        waiting: requests that wait and have slots, in the order in which they are to start. To look at one costs the more the
            longer the known beginning of its prompt is: do not look further than need be.
        chunked_context: a prompt may be read in several steps.
        equal_progress: prompts that do not fit together are each read a part; else the oldest first.
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
        """Blocks that those who run come to need sooner or later: one for each token of a step."""
        return self.decode.num_slots + len(self.prefill)


@dataclass(frozen=True)
class Decision:
    """What the step holds.

    Attributes:
        chunks: prompt tokens to read in this step by each running context request, in the snapshot's order.
        admitted: the same for the first `len(admitted)` waiting requests, which start to run.
        skipped: indices of generation requests that sit this step out, because a block that they need is not free yet.
        paused: indices of running requests, generation first and context behind, that give all they hold back and wait.
    """

    chunks: tuple[int, ...]
    admitted: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()


Policy = Callable[[Snapshot], Decision]
