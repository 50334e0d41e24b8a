"""Shows a policy the state of the engine, and carries out nothing: the batch does what it decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from torchweave.engine.active import Active, Queue
from torchweave.engine.kv_cache import KVCache
from torchweave.engine.limits import Limits
from torchweave.engine.scheduler import Context, Decision, Generation, Policy, Snapshot, Waiting
from torchweave.engine.scheduler.waiting import holds_back
from torchweave.engine.slots import Slots


class Planner:
    """Asks the policy what the next step holds.

    Args:
        limits: sizes, and how the tokens of a step are divided.
        policy: decides which waiting requests start, which running ones are paused, and how much of each prompt is read.
        kv, slots: what is asked about.
        reuse: sequences that begin alike share KV cache blocks.
    """

    def __init__(self, limits: Limits, policy: Policy, kv: KVCache, slots: Slots, reuse: bool) -> None:
        self._limits = limits
        self._policy = policy
        self._kv = kv
        self._slots = slots
        self._reuse = reuse
        self._held_for = 0  # steps that prompts have been held back

    def decide(
        self, generating: np.ndarray, context: Sequence[int], waiting: Queue, leaving: Sequence[int]
    ) -> Decision | None:
        """The policy's decision; None when there is nothing to decide: all generate, and all have the blocks they need.

        Args:
            generating, context, leaving: slots that generate, that read their prompts, and that wait to be left.
            waiting: requests that wait for a slot.
        """
        lacking = self._kv.lacking(generating, self._slots.computed[generating] + 1)
        if not waiting and not context and lacking.sum() <= self._kv.num_free:
            return None
        snapshot = self._snapshot(lacking, generating, context, waiting, leaving)
        decision = self._policy(snapshot)
        if self._holds_back(snapshot):
            return Decision((0,) * len(context), (), decision.resting, decision.paused)
        return decision

    def known(self, active: Active) -> tuple[list[int], int]:
        """Blocks that hold the beginning of a request's context, all of it but a token at least, and how many are idle."""
        if not self._reuse:
            return [], 0
        context = active.context
        hashes = active.hashes(context, self._kv.block_size)
        return self._kv.match(hashes[: (len(context) - 1) // self._kv.block_size])

    def _snapshot(
        self,
        lacking: np.ndarray,
        generating: np.ndarray,
        context: Sequence[int],
        waiting: Queue,
        leaving: Sequence[int],
    ) -> Snapshot:
        kv, slots, limits = self._kv, self._slots, self._limits
        own = kv.held - kv.shared
        return Snapshot(
            max_num_tokens=limits.max_num_tokens,
            free_slots=len(slots.free),
            taken_slots=len(slots.of),
            block_size=kv.block_size,
            free_blocks=kv.num_free,
            unreserved_blocks=kv.num_unreserved,
            leaving_blocks=int(own[leaving].sum()) if leaving else 0,
            generation=Generation(lacking, own[generating], slots.started[generating]),
            context=tuple(self._context(slot) for slot in context),
            waiting=tuple(self._waiting(waiting)),
            chunked_context=limits.chunked_context,
            equal_progress=limits.equal_progress,
        )

    def _context(self, slot: int) -> Context:
        kv, slots = self._kv, self._slots
        left, held = slots.context_left(slot), int(kv.held[slot])
        room = min(left, held * kv.block_size - int(slots.computed[slot]))
        return Context(left, room, held - int(kv.shared[slot]), int(slots.started[slot]))

    def _waiting(self, waiting: Queue) -> Iterator[Waiting]:
        """Those that could start in this step."""
        tokens = self._limits.max_num_tokens
        for active, _ in zip(waiting, self._slots.free, strict=False):
            blocks, revived = self.known(active)
            left = active.context_len - len(blocks) * self._kv.block_size
            most = self._kv.blocks_for(self._limits.last_position(active.request))
            yield Waiting(left, most - len(blocks) + revived, revived)
            tokens -= left
            if tokens <= 0 and not self._limits.equal_progress:
                return

    def _holds_back(self, snapshot: Snapshot) -> bool:
        limits = self._limits
        held = holds_back(snapshot, self._held_for, limits.batch_wait_timeout_iters, limits.batch_wait_max_tokens_ratio)
        self._held_for = self._held_for + 1 if held else 0
        return held
