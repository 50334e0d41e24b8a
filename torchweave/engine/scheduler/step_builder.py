"""Build steps: the tokens of each row, the blocks for them, and the updates of device state before the step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.prefix_index import BlockGrant
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.parts.base import Parts, StepRows
from torchweave.engine.scheduler.request_state import RequestState, SlotTable
from torchweave.engine.scheduler.running_set import NO_SLOTS, RunningSet, SlotGroup
from torchweave.engine.scheduler.step import Chunk, Payload, Step
from torchweave.ops.slot_fields import PARAMS
from torchweave.ops.slot_state import SlotUpdates

LOOKAHEAD_TOKENS = 16  # tokens: a sequence gets its next block this early, together with others that need one soon

_PARAMS_OF = attrgetter(*PARAMS)


class StepBuilder:
    """Owner of the pending device updates and the step counter.

    Args:
        limits: sizes of steps and requests.
        updates: collects updates of device state for the next step.
        parts: of the engine.

    Attributes:
        next_index: index of the next step.
    """

    def __init__(self, limits: Limits, updates: SlotUpdates, parts: Parts) -> None:
        self.next_index = 0
        self._limits = limits
        self._updates = updates
        self._parts = parts
        self._device_decode_slots = NO_SLOTS  # decode slots as the device has them
        self._chunk_slots: list[int] = []  # slots with a chunk in the last step; see `cache_chunks`

    def write_blocks(self, grant: BlockGrant) -> None:
        """Enter new blocks into the device's block tables."""
        self._updates.set_block_table(grant.slots, grant.block_indices, grant.blocks)

    def write_request(self, slot: int, state: RequestState) -> None:
        """Enter a request's sampling parameters into a slot of the device."""
        params = state.request.sampling
        values = dict(zip(PARAMS, _PARAMS_OF(params), strict=True))
        values["position"] = state.prefill_len - 1
        values["min_position"] = min(len(state.prompt) + params.min_tokens, self._limits.max_model_len)
        values["top_k"] = min(max(params.top_k, 0), self._limits.vocab_size)
        if state.search is not None:
            values["temperature"] = 0.0
        self._updates.set_request(slot, values, state.seed, state.stops)

    def rows_of_step(self, running: RunningSet, decoding: np.ndarray, alone: bool) -> np.ndarray:
        """The slots of `decoding` in the next step: one micro-batch of those that may run; for `alone` see `micro_batch`."""
        for part in self._parts.active:
            decoding = part.runnable(decoding)
        if self._limits.num_micro_batches == 1:
            return decoding
        return decoding[running.micro_batch(decoding, self.next_index, self._limits.num_micro_batches, alone)]

    def build(
        self,
        running: RunningSet,
        kv: BlockManager,
        decoding: np.ndarray,
        chunks: Sequence[tuple[int, int]] = (),
        groups: Sequence[SlotGroup] = (),
    ) -> Step:
        """Build a step and advance `running` past it.

        Args:
            decoding: slots that take one token.
            chunks: (slot, number of tokens) of prompts.
            groups: requests with several slots, which take one token per sequence.
        """
        table, num_computed, decode_rows, forks = running.slots, running.slots.num_computed, decoding, []
        if groups:
            decode_rows, forks = self._with_groups(decoding, groups)
        query_len = 1
        if self._limits.query_len > 1 and not chunks and not groups:
            query_len = max((part.query_len(decoding) for part in self._parts.active), default=1)
        starts, slots, prefill_chunks = num_computed[decode_rows], decode_rows, []
        sizes = np.where(table.drafting[decode_rows], query_len, 1) if query_len > 1 else np.int64(1)
        if chunks:
            prefill_chunks = [(slot, _chunk(table, slot, size)) for slot, size in chunks]
            slots = np.concatenate([decode_rows, np.array([slot for slot, _ in chunks], np.int32)])
            sizes = np.ones(len(slots), np.int64)
            sizes[len(decode_rows) :] = [size for _, size in chunks]
        after, limit = num_computed[slots] + sizes, table.limit[slots]
        # Drafts end at the limit, but which of them are kept is not known yet.
        stored = np.minimum(after, limit) if self._limits.query_len > 1 else after
        if running.steps_before_alloc and not chunks and not groups:
            running.steps_before_alloc -= 1
        else:
            self._allocate_blocks(kv, slots, stored, limit)
            all_decode = not chunks and not running.groups and len(decoding) == len(running.decoding)
            running.steps_before_alloc = self._steps_in_blocks(kv, slots, after, limit) if all_decode else 0
        num_computed[slots] = after
        emits = np.ones(len(slots), bool)
        if chunks:
            emits[len(decode_rows) :] = [self._finish_chunk(running, kv, slot) for slot, _ in chunks]
        depends_on = max(running.completed, int(table.last_step_index[decode_rows].max(initial=-1)))
        parts: dict[str, Payload] = {}
        if self._parts.active:
            extra = query_len, forks, len(decode_rows) - len(decoding) - len(groups)
            parts = self._parts.payloads(StepRows(self.next_index, slots, emits, decode_rows, prefill_chunks, *extra))
        step = Step(
            index=self.next_index,
            slots=slots,
            starts=starts,
            chunks=tuple(chunk for _, chunk in prefill_chunks) if chunks else (),
            emits=emits,
            updates=self._take_updates(None if chunks else decode_rows),
            max_seq_len=int(stored.max()),
            depends_on=depends_on,
            query_len=query_len,
            parts=parts,
        )
        table.last_step_index[slots] = step.index
        self.next_index += 1
        below_limit = after < limit
        all_continue = len(slots) == len(decoding) == len(running.decoding) and bool(below_limit.all())
        if running.prefill or not all_continue:
            running.advance(kv, self._updates, decoding, slots, below_limit, emits)
        return step

    def _with_groups(
        self, decoding: np.ndarray, groups: Sequence[SlotGroup]
    ) -> tuple[np.ndarray, Sequence[tuple[int, int]]]:
        """The decode rows with those of groups, and `StepRows.forks`."""
        added = [rows for part in self._parts.active if (rows := part.add_rows(groups)) is not None]
        forks = [fork for _, forks in added for fork in forks]
        return np.concatenate([decoding, *(slots for slots, _ in added)]), forks

    def _finish_chunk(self, running: RunningSet, kv: BlockManager, slot: int) -> bool:
        """Cache the full blocks of a prompt up to its new chunk, now or later; returns whether this was the last one."""
        is_last = running.slots.remaining_prefill(slot) == 0
        if not (running.slots.group[slot] >= 0 or kv.has_windows or kv.snapshots is not None):
            self._chunk_slots.append(slot)
            return is_last
        num_computed = int(running.slots.num_computed[slot])
        running.cache_full_blocks(kv, slot, num_computed)
        if is_last:
            span = self._limits.decode_span + LOOKAHEAD_TOKENS
            kv.shrink_reservation(slot, num_computed, int(running.slots.limit[slot]), span)
        return is_last

    def cache_chunks(self, running: RunningSet, kv: BlockManager) -> None:
        """Cache the full blocks of the last step's chunks, before the next decision looks them up.

        Hashing a prompt takes longer than its launch, and the device computes the step meanwhile. Requests that have ended since
        cache their blocks when they are released.
        """
        for slot in self._chunk_slots:
            if not running.slots.done[slot]:
                running.cache_full_blocks(kv, slot, int(running.slots.num_computed[slot]))
        self._chunk_slots.clear()

    def _steps_in_blocks(self, kv: BlockManager, slots: np.ndarray, after: np.ndarray, limit: np.ndarray) -> int:
        """Decode steps of `slots` that need no further block."""
        held_tokens = kv.held_blocks[slots] * kv.block_size
        if self._limits.query_len == 1:
            return int((held_tokens - after).min())
        short = held_tokens < limit
        return int((held_tokens - after)[short].min(initial=LOOKAHEAD_TOKENS)) // self._limits.query_len

    def _allocate_blocks(self, kv: BlockManager, slots: np.ndarray, after: np.ndarray, limit: np.ndarray) -> None:
        """Allocate the blocks for `after` tokens per slot, and for some lookahead tokens if enough blocks are free."""
        needed = kv.blocks_needed(slots, after)
        if not needed.any():
            return
        ahead = kv.blocks_needed(slots, np.maximum(np.minimum(after + LOOKAHEAD_TOKENS, limit), after))
        self.write_blocks(kv.grant(slots, ahead if ahead.sum() <= kv.free_logical_blocks else needed))

    def _take_updates(self, decode_rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """Take the pending updates, for a decode-only step (`decode_rows`) with the device's list of decode slots."""
        if decode_rows is not None and not np.array_equal(decode_rows, self._device_decode_slots):
            self._updates.set_decode_slots(decode_rows)
            self._device_decode_slots = decode_rows
        return self._updates.take() if len(self._updates) else None

    def clear(self) -> None:
        """Discard the pending updates."""
        self._chunk_slots.clear()
        self._updates.take()


def _chunk(table: SlotTable, slot: int, size: int) -> Chunk:
    start = int(table.num_computed[slot])
    return Chunk(start, table.prefill_tokens[slot][start : start + size])
