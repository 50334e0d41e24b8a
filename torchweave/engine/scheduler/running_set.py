"""The slots in use: which read their prompts, which generate, and which are about to be left."""

from __future__ import annotations

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.scheduler.beams import BeamGroup, BeamSearches
from torchweave.engine.scheduler.logits_processors import LogitsProcessors
from torchweave.engine.scheduler.slot_table import SlotTable

NO_SLOTS = np.empty(0, np.int32)


class RunningSet:
    """What the batch, the planner and the former of steps share.

    Args:
        slots: facts about the running requests.
        beams: searches, whose slots are in none of the lists below but `prefill`, the one of their beam that is read, and
            `pending_release`, the first of them.
        kv: owner of the KV cache's blocks.
        reuse: sequences that begin alike share KV cache blocks.

    Attributes:
        prefill: slots whose prompt is still being read, oldest first.
        decoding: slots that take one token a step.
        pending_release: slots that are done or paused but may still be named by a step in flight.
        completed: index of the last step whose result was taken in.
        logits_processors: which requests have their logits changed.
    """

    def __init__(self, slots: SlotTable, beams: BeamSearches, kv: BlockManager, reuse: bool) -> None:
        self.slots = slots
        self.beams = beams
        self.kv = kv
        self.reuse = reuse
        self.prefill: list[int] = []
        self.decoding = NO_SLOTS
        self.pending_release: list[int] = []
        self.completed = -1
        self.logits_processors = LogitsProcessors(len(slots.state))

    def in_flight(self, slot: int) -> bool:
        return self.slots.last_step_index[slot] > self.completed

    def stop(self, slot: int) -> None:
        """Name a slot in no step from here on; it is left when those that name it have completed."""
        if slot not in self.pending_release:
            self.pending_release.append(slot)
        if slot in self.prefill:
            self.prefill.remove(slot)
        self.decoding = self.decoding[self.decoding != slot]

    def stop_search(self, group: BeamGroup) -> None:
        """The same for all slots of a beam search."""
        group.pending_release = True
        for slot in set(group.members) & set(self.prefill):
            self.prefill.remove(slot)
        self.stop(group.leader)

    def advance(self, generated: np.ndarray, slots: np.ndarray, after: np.ndarray, emits: np.ndarray) -> None:
        """A step was formed. Those go on that emit and have not read all they may, and those that rested.

        Args:
            generated: slots of `decoding` that took part.
            slots, emits: rows of the step.
            after: tokens of each that are read when the step has run.
        """
        more = after < self.slots.limit[slots]
        rested = NO_SLOTS
        if len(generated) < len(self.decoding):
            rested = self.decoding[~np.isin(self.decoding, generated)]
        if self.prefill:
            self.prefill = [now for slot in self.prefill if (now := self._next_prefill_slot(slot)) is not None]
        if len(slots) > len(generated) or rested.size or not more.all():
            going = slots[emits & more]
            if self.beams:
                going = going[self.slots.group[going] < 0]
            self.decoding = np.concatenate([going, rested])

    def _next_prefill_slot(self, slot: int) -> int | None:
        """The slot in which what `slot` reads goes on: itself, that of a search's next beam, or None when all was read."""
        if self.slots.remaining_prefill(slot) > 0:
            return slot
        return self.beams.prefill_next_beam(slot) if self.slots.group[slot] >= 0 else None

    def cache_full_blocks(self, slot: int, num_tokens: int) -> None:
        """Let others use the full blocks among the first `num_tokens` tokens of a slot, which launched steps have read."""
        if self.reuse:
            if self.slots.group[slot] >= 0:  # beams change from step to step
                num_tokens = min(num_tokens, len(self.slots.state_of(slot).prompt))
            tokens = self.slots.sequence(slot, num_tokens)
            hashes = self.slots.state_of(slot).hashes(tokens, self.kv.block_size)
            self.kv.cache_full_blocks(slot, hashes, first=int(self.kv.num_shared[slot]))

    def release(self, slot: int) -> None:
        """Give back a slot and its blocks."""
        self.logits_processors.release(slot)
        self.slots.release(slot)
        self.kv.free(slot)

    def clear(self) -> None:
        """Leave every slot, whatever names it."""
        for group in list(self.beams.groups.values()):
            self.beams.release(group)
        for slot in list(self.slots.of.values()):
            self.release(slot)
        self.logits_processors.clear()
        self.prefill.clear()
        self.pending_release.clear()
        self.decoding = NO_SLOTS
