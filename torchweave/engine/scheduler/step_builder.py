"""Forms steps: which tokens each row reads, the blocks that they need, and what the device has to be told before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchweave.engine.kv_cache.prefix_index import Match
from torchweave.engine.sampling.prompt_logprobs import scored
from torchweave.engine.scheduler.beams import Group
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.request_state import Active
from torchweave.engine.scheduler.running_set import NO_SLOTS, Running
from torchweave.engine.scheduler.step import Chunk, Scored, Step
from torchweave.ops.slot_state import SlotUpdates

GRANT_AHEAD = 16  # tokens: a sequence gets its next block this early, together with others that need one soon


class Former:
    """Turns a decision into a step.

    Args:
        limits: sizes.
        running: the slots in use.
        updates: collects what the device has to be told before the next step.

    Attributes:
        spare: so many steps without context need no block for anyone.
    """

    def __init__(self, limits: Limits, running: Running, updates: SlotUpdates) -> None:
        self.spare = 0
        self._limits = limits
        self._running = running
        self._slots = running.slots
        self._kv = running.kv
        self._updates = updates
        self._on_device = NO_SLOTS  # the generating slots as the device knows them
        self._next_index = 0

    def start(self, active: Active, known: Match) -> int:
        """Give a request a slot that begins with what is `known`, and tell the device all it has to know about it."""
        last = self._limits.last_position(active.request)
        slot = self._slots.occupy(active, last, known.columns * self._kv.block_size)
        if known.columns:
            grant = self._kv.attach(slot, known)
            self._updates.set_blocks(grant.slots, grant.columns, grant.blocks)
        self._kv.missed_total += active.context_len // self._kv.block_size - known.columns
        self._kv.reserve(slot, last)
        self._running.context.append(slot)
        self._tell(slot, active)
        self._running.adjustments.start(slot, active)
        if active.search is not None:
            for other in self._running.beams.start(slot, active).slots[1:]:
                self._tell(other, active)
        return slot

    def _tell(self, slot: int, active: Active) -> None:
        """What the device knows of a slot's request."""
        params = active.request.sampling
        self._updates.set_request(
            slot,
            position=active.context_len - 1,
            min_position=min(len(active.prompt) + params.min_tokens, self._limits.max_model_len),
            temperature=params.temperature if active.search is None else 0.0,
            top_k=min(max(params.top_k, 0), self._limits.vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=active.seed,
            stop_ids=active.stops,
        )

    def form(
        self, generated: np.ndarray, chunks: Sequence[tuple[int, int]] = (), searches: Sequence[Group] = ()
    ) -> Step:
        """The step of one token for each slot of `generated`, of (slot, number of tokens) chunks of prompts, and of one token
        for each beam of `searches`."""
        running, computed = self._running, self._slots.computed
        generating, forked = generated, []
        if searches:
            rows, forked = running.beams.go_on(searches)
            generating = np.concatenate([generated, rows])
        starts = computed[generating]
        slots, sizes, reads = generating, np.int64(1), ()
        if chunks:
            slots = np.concatenate([generating, np.array([slot for slot, _ in chunks], np.int32)])
            sizes = np.concatenate([np.ones(len(generating), np.int64), [size for _, size in chunks]])
            reads = tuple(self._chunk(slot, size) for slot, size in chunks)
        after = computed[slots] + sizes
        if self.spare and not chunks and not searches:
            self.spare -= 1
        else:
            self._grant(slots, after)
            everyone = not chunks and not running.beams and len(generated) == len(running.generating)
            self.spare = int((self._kv.held[slots] * self._kv.block_size - after).min()) if everyone else 0
        copies = running.beams.copied(forked)
        computed[slots] = after
        emits = np.ones(len(slots), bool)
        for row, (slot, _) in enumerate(chunks, start=len(generating)):
            emits[row] = self._slots.context_left(slot) == 0
            running.publish(slot, int(computed[slot]))
            if emits[row]:
                self._kv.narrow(slot, int(computed[slot]), int(self._slots.limit[slot]), 1 + GRANT_AHEAD)

        step = Step(
            index=self._next_index,
            slots=slots,
            starts=starts,
            chunks=reads,
            emits=emits,
            updates=self._take_updates(None if chunks else generating),
            max_seq_len=int(after.max()),
            logprobs=self._logprob_rows(slots, emits),
            adjust=running.adjustments.of(slots, emits),
            scored=self._scored(chunks, reads, len(generating)) if chunks else None,
            copies=copies,
            extra_rows=len(generating) - len(generated) - len(searches),
        )
        self._slots.last_named[slots] = step.index
        if running.beams:
            running.beams.named(slots, step.index)
        self._next_index += 1
        running.advance(generated, slots, after, emits)
        return step

    def _scored(self, chunks: Sequence[tuple[int, int]], reads: Sequence[Chunk], first: int) -> Scored | None:
        slots = [slot for slot, _ in chunks]
        return scored(
            [(slot, self._slots.request_in(slot), chunk) for slot, chunk in zip(slots, reads, strict=True)], first
        )

    def _chunk(self, slot: int, size: int) -> Chunk:
        start = int(self._slots.computed[slot])
        return Chunk(start, self._slots.contexts[slot][start : start + size])

    def _grant(self, slots: np.ndarray, after: np.ndarray) -> None:
        """Give the blocks that a step needs, and some tokens more where there is enough."""
        if not self._kv.lacking(slots, after).any():
            return
        wanted = np.maximum(np.minimum(after + GRANT_AHEAD, self._slots.limit[slots]), after)
        if self._kv.lacking(slots, wanted).sum() > self._kv.free_columns:
            wanted = after
        grant = self._kv.grant(slots, wanted)
        self._updates.set_blocks(grant.slots, grant.columns, grant.blocks)

    def _take_updates(self, generating: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """Pending changes; the list of generating slots is brought up to date when the step reads it (decode only)."""
        if generating is not None and not np.array_equal(generating, self._on_device):
            self._updates.set_batch(generating)
            self._on_device = generating
        return self._updates.take() if len(self._updates) else None

    def _logprob_rows(self, slots: np.ndarray, emits: np.ndarray) -> tuple[np.ndarray, int] | None:
        rows = np.flatnonzero(self._slots.special[slots] & emits)
        counts = [self._slots.request_in(int(slots[row])).num_logprobs for row in rows]
        wanted = [(row, count) for row, count in zip(rows, counts, strict=True) if count >= 0]
        if not wanted:
            return None
        return np.array([row for row, _ in wanted]), max(count for _, count in wanted)

    def clear(self) -> None:
        """Forget what was to be told to the device."""
        self.spare = 0
        self._updates.take()
