"""The slots in use: which read their prompts, which generate, and which are about to be left."""

from __future__ import annotations

import numpy as np

from torchweave.engine.kv_cache.block_manager import KVCache
from torchweave.engine.sampling.logits_processors import Adjustments
from torchweave.engine.scheduler.beams import Beams, Group
from torchweave.engine.scheduler.slot_table import Slots

NO_SLOTS = np.empty(0, np.int32)


class Running:
    """What the batch, the planner and the former of steps share.

    Args:
        slots: facts about the running requests.
        beams: searches, whose slots are in none of the lists below but `context`, the one of their beam that is read, and
            `leaving`, the first of them.
        kv: owner of the KV cache's blocks.
        reuse: sequences that begin alike share KV cache blocks.

    Attributes:
        context: slots whose prompt is still being read, oldest first.
        generating: slots that take one token a step.
        leaving: slots that are done or paused but may still be named by a step in flight.
        completed: index of the last step whose result was taken in.
        adjustments: which requests have their logits changed.
    """

    def __init__(self, slots: Slots, beams: Beams, kv: KVCache, reuse: bool) -> None:
        self.slots = slots
        self.beams = beams
        self.kv = kv
        self.reuse = reuse
        self.context: list[int] = []
        self.generating = NO_SLOTS
        self.leaving: list[int] = []
        self.completed = -1
        self.adjustments = Adjustments(len(slots.active))

    def in_flight(self, slot: int) -> bool:
        return self.slots.last_named[slot] > self.completed

    def stop(self, slot: int) -> None:
        """Name a slot in no step from here on; it is left when those that name it have completed."""
        if slot not in self.leaving:
            self.leaving.append(slot)
        if slot in self.context:
            self.context.remove(slot)
        self.generating = self.generating[self.generating != slot]

    def stop_search(self, group: Group) -> None:
        """The same for all slots of a beam search."""
        group.leaving = True
        for slot in set(group.members) & set(self.context):
            self.context.remove(slot)
        self.stop(group.leader)

    def advance(self, generated: np.ndarray, slots: np.ndarray, after: np.ndarray, emits: np.ndarray) -> None:
        """A step was formed. Those go on that emit and have not read all they may, and those that rested.

        Args:
            generated: slots of `generating` that took part.
            slots, emits: rows of the step.
            after: tokens of each that are read when the step has run.
        """
        more = after < self.slots.limit[slots]
        rested = NO_SLOTS
        if len(generated) < len(self.generating):
            rested = self.generating[~np.isin(self.generating, generated)]
        if self.context:
            self.context = [now for slot in self.context if (now := self._reads_on(slot)) is not None]
        if len(slots) > len(generated) or rested.size or not more.all():
            going = slots[emits & more]
            if self.beams:
                going = going[self.slots.group[going] < 0]
            self.generating = np.concatenate([going, rested])

    def _reads_on(self, slot: int) -> int | None:
        """The slot in which what `slot` reads goes on: itself, that of a search's next beam, or None when all was read."""
        if self.slots.context_left(slot) > 0:
            return slot
        return self.beams.read_on(slot) if self.slots.group[slot] >= 0 else None

    def publish(self, slot: int, num_tokens: int) -> None:
        """Let others use the full blocks among the first `num_tokens` tokens of a slot, which launched steps have read."""
        if self.reuse:
            if self.slots.group[slot] >= 0:  # beams change from step to step
                num_tokens = min(num_tokens, len(self.slots.request_in(slot).prompt))
            tokens = self.slots.sequence(slot, num_tokens)
            hashes = self.slots.request_in(slot).hashes(tokens, self.kv.block_size)
            self.kv.publish(slot, hashes, first=int(self.kv.shared[slot]))

    def leave(self, slot: int) -> None:
        """Give back a slot and its blocks."""
        self.adjustments.leave(slot)
        self.slots.vacate(slot)
        self.kv.free(slot)

    def clear(self) -> None:
        """Leave every slot, whatever names it."""
        for group in list(self.beams.groups.values()):
            self.beams.leave(group)
        for slot in list(self.slots.of.values()):
            self.leave(slot)
        self.adjustments.clear()
        self.context.clear()
        self.leaving.clear()
        self.generating = NO_SLOTS
