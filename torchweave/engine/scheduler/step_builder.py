"""Forms steps: which tokens each row reads, the blocks that they need, and what the device has to be told before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.scheduler.beams import BeamGroup
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.prompt_logprobs import prompt_targets
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.running_set import NO_SLOTS, RunningSet
from torchweave.engine.scheduler.step import Chunk, PromptTargets, Step
from torchweave.ops.slot_state import SlotUpdates

LOOKAHEAD_TOKENS = 16  # tokens: a sequence gets its next block this early, together with others that need one soon


class StepBuilder:
    """Turns a decision into a step.

    Args:
        limits: sizes.
        running: the slots in use.
        updates: collects what the device has to be told before the next step.

    Attributes:
        steps_before_alloc: so many steps without context need no block for anyone.
    """

    def __init__(self, limits: Limits, running: RunningSet, updates: SlotUpdates) -> None:
        self.steps_before_alloc = 0
        self._limits = limits
        self._running = running
        self._slots = running.slots
        self._kv = running.kv
        self._updates = updates
        self._device_decode_slots = NO_SLOTS  # the generating slots as the device knows them
        self._next_index = 0

    def start(self, state: RequestState, prefix_hit: PrefixHit) -> int:
        """Give a request a slot that begins with what is `prefix_hit`, and tell the device all it has to know about it."""
        last = self._limits.last_position(state.request)
        slot = self._slots.allocate(state, last, prefix_hit.block_indices * self._kv.block_size)
        if prefix_hit.block_indices:
            grant = self._kv.attach(slot, prefix_hit)
            self._updates.set_block_table(grant.slots, grant.block_indices, grant.blocks)
        self._kv.missed_total += state.prefill_len // self._kv.block_size - prefix_hit.block_indices
        self._kv.reserve(slot, last)
        self._running.prefill.append(slot)
        self._write_slot_state(slot, state)
        self._running.logits_processors.start(slot, state)
        if state.search is not None:
            for other in self._running.beams.start(slot, state).slots[1:]:
                self._write_slot_state(other, state)
        return slot

    def _write_slot_state(self, slot: int, state: RequestState) -> None:
        """What the device knows of a slot's request."""
        params = state.request.sampling
        self._updates.set_request(
            slot,
            position=state.prefill_len - 1,
            min_position=min(len(state.prompt) + params.min_tokens, self._limits.max_model_len),
            temperature=params.temperature if state.search is None else 0.0,
            top_k=min(max(params.top_k, 0), self._limits.vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=state.seed,
            stop_ids=state.stops,
        )

    def build(
        self, generated: np.ndarray, chunks: Sequence[tuple[int, int]] = (), searches: Sequence[BeamGroup] = ()
    ) -> Step:
        """The step of one token for each slot of `generated`, of (slot, number of tokens) chunks of prompts, and of one token
        for each beam of `searches`."""
        running, num_computed = self._running, self._slots.num_computed
        decoding, forked = generated, []
        if searches:
            rows, forked = running.beams.assign_slots(searches)
            decoding = np.concatenate([generated, rows])
        starts = num_computed[decoding]
        slots, sizes, prefill_chunks = decoding, np.int64(1), ()
        if chunks:
            slots = np.concatenate([decoding, np.array([slot for slot, _ in chunks], np.int32)])
            sizes = np.concatenate([np.ones(len(decoding), np.int64), [size for _, size in chunks]])
            prefill_chunks = tuple(self._chunk(slot, size) for slot, size in chunks)
        after = num_computed[slots] + sizes
        if self.steps_before_alloc and not chunks and not searches:
            self.steps_before_alloc -= 1
        else:
            self._allocate_blocks(slots, after)
            everyone = not chunks and not running.beams and len(generated) == len(running.decoding)
            self.steps_before_alloc = (
                int((self._kv.held_blocks[slots] * self._kv.block_size - after).min()) if everyone else 0
            )
        copies = running.beams.block_copies(forked)
        num_computed[slots] = after
        emits = np.ones(len(slots), bool)
        for row, (slot, _) in enumerate(chunks, start=len(decoding)):
            emits[row] = self._slots.remaining_prefill(slot) == 0
            running.cache_full_blocks(slot, int(num_computed[slot]))
            if emits[row]:
                self._kv.shrink_reservation(
                    slot, int(num_computed[slot]), int(self._slots.limit[slot]), 1 + LOOKAHEAD_TOKENS
                )

        step = Step(
            index=self._next_index,
            slots=slots,
            starts=starts,
            chunks=prefill_chunks,
            emits=emits,
            updates=self._take_updates(None if chunks else decoding),
            max_seq_len=int(after.max()),
            logprobs=self._logprob_rows(slots, emits),
            logits_processors=running.logits_processors.of(slots, emits),
            prompt_targets=self._scored(chunks, prefill_chunks, len(decoding)) if chunks else None,
            copies=copies,
            extra_rows=len(decoding) - len(generated) - len(searches),
        )
        self._slots.last_step_index[slots] = step.index
        if running.beams:
            running.beams.mark_scheduled(slots, step.index)
        self._next_index += 1
        running.advance(generated, slots, after, emits)
        return step

    def _scored(
        self, chunks: Sequence[tuple[int, int]], prefill_chunks: Sequence[Chunk], first: int
    ) -> PromptTargets | None:
        slots = [slot for slot, _ in chunks]
        return prompt_targets(
            [(slot, self._slots.state_of(slot), chunk) for slot, chunk in zip(slots, prefill_chunks, strict=True)],
            first,
        )

    def _chunk(self, slot: int, size: int) -> Chunk:
        start = int(self._slots.num_computed[slot])
        return Chunk(start, self._slots.prefill_tokens[slot][start : start + size])

    def _allocate_blocks(self, slots: np.ndarray, after: np.ndarray) -> None:
        """Give the blocks that a step needs, and some tokens more where there is enough."""
        if not self._kv.blocks_needed(slots, after).any():
            return
        wanted = np.maximum(np.minimum(after + LOOKAHEAD_TOKENS, self._slots.limit[slots]), after)
        if self._kv.blocks_needed(slots, wanted).sum() > self._kv.free_logical_blocks:
            wanted = after
        grant = self._kv.grant(slots, wanted)
        self._updates.set_block_table(grant.slots, grant.block_indices, grant.blocks)

    def _take_updates(self, decoding: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """Pending changes; the list of generating slots is brought up to date when the step reads it (decode only)."""
        if decoding is not None and not np.array_equal(decoding, self._device_decode_slots):
            self._updates.set_decode_slots(decoding)
            self._device_decode_slots = decoding
        return self._updates.take() if len(self._updates) else None

    def _logprob_rows(self, slots: np.ndarray, emits: np.ndarray) -> tuple[np.ndarray, int] | None:
        rows = np.flatnonzero(self._slots.needs_host_work[slots] & emits)
        counts = [self._slots.state_of(int(slots[row])).num_logprobs for row in rows]
        wanted = [(row, count) for row, count in zip(rows, counts, strict=True) if count >= 0]
        if not wanted:
            return None
        return np.array([row for row, _ in wanted]), max(count for _, count in wanted)

    def clear(self) -> None:
        """Forget what was to be told to the device."""
        self.steps_before_alloc = 0
        self._updates.take()
