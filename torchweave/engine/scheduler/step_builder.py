"""Build steps: the tokens of each row, the blocks for them, and the updates of device state before the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.image_rows import ImageRows
from torchweave.engine.kv_cache.prefix_index import BlockGrant
from torchweave.engine.kv_cache.state_snapshots import Copies
from torchweave.engine.scheduler.beams import BeamGroup, block_copies
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.prompt_logprobs import make_prompt_targets
from torchweave.engine.scheduler.request_state import RequestState, SlotTable
from torchweave.engine.scheduler.running_set import NO_SLOTS, RunningSet
from torchweave.engine.scheduler.speculation import AdaptiveDrafts
from torchweave.engine.scheduler.step import Chunk, Step
from torchweave.ops.slot_state import SlotUpdates

LOOKAHEAD_TOKENS = 16  # tokens: a sequence gets its next block this early, together with others that need one soon


class StepBuilder:
    """Owner of the pending device updates and the step counter.

    Args:
        limits: sizes of steps and requests.
        updates: collects updates of device state for the next step.
        image_rows: of a model that takes images.
        adaptive_drafts: selects the number of drafts of a step; None: as many as the limits allow.

    Attributes:
        steps_before_alloc: number of decode-only steps before any request needs a block.
        next_index: index of the next step.
    """

    def __init__(
        self,
        limits: Limits,
        updates: SlotUpdates,
        image_rows: ImageRows | None = None,
        adaptive_drafts: AdaptiveDrafts | None = None,
    ) -> None:
        self.steps_before_alloc = 0
        self._limits = limits
        self._updates = updates
        self._image_rows = image_rows
        self._adaptive_drafts = adaptive_drafts
        self._device_decode_slots = NO_SLOTS  # decode slots as the device has them
        self._chunk_slots: list[int] = []  # slots with a chunk in the last step; see `cache_chunks`
        self.next_index = 0

    def write_blocks(self, grant: BlockGrant) -> None:
        """Enter new blocks into the device's block tables."""
        self._updates.set_block_table(grant.slots, grant.block_indices, grant.blocks)

    def write_request(self, slot: int, state: RequestState) -> None:
        """Enter a request's sampling parameters into a slot of the device."""
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
        if self._has_rope:
            self._updates.set("rope_delta", slot, state.rope_delta)

    @property
    def _has_rope(self) -> bool:
        return self._image_rows is not None and self._image_rows.model.rope_axes > 0

    def write_history(self, slot: int, state: RequestState, limit: int, drafting: bool, num_cached_tokens: int) -> None:
        """Upload the token history for the drafter, and the last position that may have a draft."""
        self._updates.set("draft_limit", slot, limit - 1 if drafting else -1)
        self._updates.set("draft_computed", slot, num_cached_tokens)
        if drafting or self._limits.token_shift:  # a head reads the tokens of every prompt there
            self._updates.set_history(slot, state.prefill)

    def build(
        self,
        running: RunningSet,
        kv: BlockManager,
        decoding: np.ndarray,
        chunks: Sequence[tuple[int, int]] = (),
        searches: Sequence[BeamGroup] = (),
    ) -> Step:
        """Build a step and advance `running` past it.

        Args:
            decoding: slots that take one token.
            chunks: (slot, number of tokens) of prompts.
            searches: beam searches, which take one token per beam.
        """
        table, num_computed, decode_rows, forked = running.slots, running.slots.num_computed, decoding, []
        if searches:
            beam_rows, forked = running.beams.assign_slots(table, kv, self._updates, searches)
            decode_rows = np.concatenate([decoding, beam_rows])
        starts = num_computed[decode_rows]
        query_len = 1 if chunks or searches else self._query_len(table, decoding)
        slots, prefill_chunks = decode_rows, [(slot, self._chunk(table, slot, size)) for slot, size in chunks]
        sizes = np.where(table.drafting[decode_rows], query_len, 1) if query_len > 1 else np.int64(1)
        if chunks:
            slots = np.concatenate([decode_rows, np.array([slot for slot, _ in chunks], np.int32)])
            sizes = np.ones(len(slots), np.int64)
            sizes[len(decode_rows) :] = [size for _, size in chunks]
        after = num_computed[slots] + sizes
        # Drafts end at the limit, but which of them are kept is not known yet.
        stored = np.minimum(after, table.limit[slots]) if self._limits.query_len > 1 else after
        if self.steps_before_alloc and not chunks and not searches:
            self.steps_before_alloc -= 1
        else:
            self._allocate_blocks(kv, slots, stored, table.limit[slots])
            all_decode = not chunks and not running.beams.groups and len(decoding) == len(running.decoding)
            self.steps_before_alloc = self._steps_in_blocks(kv, slots, after, table.limit[slots]) if all_decode else 0
        copies = block_copies(table, kv, forked)
        num_computed[slots] = after
        emits = np.ones(len(slots), bool)
        emits[len(decode_rows) :] = [self._finish_chunk(running, kv, slot) for slot, _ in chunks]
        processors = running.logits_processors
        step = Step(
            index=self.next_index,
            slots=slots,
            starts=starts,
            chunks=tuple(chunk for _, chunk in prefill_chunks),
            emits=emits,
            updates=self._take_updates(None if chunks else decode_rows),
            max_seq_len=int(stored.max()),
            logprobs=_logprob_rows(table, slots, emits),
            logits_processors=processors.rows_of_step(slots, emits) if processors.count else None,
            prompt_targets=make_prompt_targets(table, prefill_chunks, len(decode_rows)),
            copies=copies,
            extra_rows=len(decode_rows) - len(decoding) - len(searches),
            query_len=query_len,
            catch_up=self._catch_up(table, decode_rows, query_len) if self._limits.drafts_by_model else 0,
            depends_on=max(running.completed, int(table.last_step_index[decode_rows].max(initial=-1))),
            **self._state_copies(kv, forked),
            **self._image_inputs(table, decode_rows, chunks),
        )
        table.last_step_index[slots] = step.index
        if running.beams.groups:
            running.beams.mark_scheduled(table, slots, step.index)
        self.next_index += 1
        running.advance(kv, self._updates, decoding, slots, after, emits)
        return step

    def _state_copies(self, kv: BlockManager, forked: Sequence[tuple[int, int]]) -> dict[str, Copies]:
        """Copies of recurrent states, by the field of `Step`: from and to snapshots, and from a beam to its fork."""
        copies = {} if kv.snapshots is None else kv.snapshots.take_copies()
        if forked and self._limits.has_recurrent_states:
            pairs = np.array(forked, np.int64).T
            sources, targets = copies.get("state_restores", (NO_SLOTS, NO_SLOTS))
            copies["state_restores"] = np.append(sources, pairs[0]), np.append(targets, pairs[1])
        return copies

    def _finish_chunk(self, running: RunningSet, kv: BlockManager, slot: int) -> bool:
        """Cache the full blocks of a prompt up to its new chunk, now or later; returns whether this was the last one."""
        is_beam, is_last = running.slots.group[slot] >= 0, running.slots.remaining_prefill(slot) == 0
        if not (is_beam or kv.has_windows or kv.snapshots is not None):
            self._chunk_slots.append(slot)
            return is_last
        num_computed = int(running.slots.num_computed[slot])
        hashes = running.cache_full_blocks(kv, slot, num_computed)
        if kv.snapshots is not None and not is_beam:
            kv.snapshots.save(slot, hashes, num_computed)
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

    def _query_len(self, table: SlotTable, decoding: np.ndarray) -> int:
        """Most tokens of a row in a step of `decoding`: 1 without a request that may have drafts, or with too many rows."""
        limits = self._limits
        if limits.query_len == 1 or len(decoding) > limits.max_drafting_rows:
            return 1
        drafting = table.drafting[decoding]
        if not drafting.any():
            return 1
        return self._adaptive_drafts.choose(decoding, drafting) if self._adaptive_drafts else limits.query_len

    def _catch_up(self, table: SlotTable, decode_rows: np.ndarray, query_len: int) -> int:
        """Most tokens of a row that a draft model lacks beyond those that it takes in the step; enters those that it will lack."""
        if query_len == 1:
            table.draft_gap[decode_rows] += 1
            return 0
        gap = int(table.draft_gap[decode_rows[table.drafting[decode_rows]]].max(initial=0))
        # The last draft of a row that keeps all; a head lacks all tokens of the step.
        shift = self._limits.token_shift
        table.draft_gap[decode_rows] = query_len if shift else 1
        return max(gap + 1 - shift - query_len, 0)

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

    def _chunk(self, table: SlotTable, slot: int, size: int) -> Chunk:
        start = int(table.num_computed[slot])
        tokens = table.prefill_tokens[slot][start : start + size]
        images = table.state_of(slot).images
        if images is not None:
            assert self._image_rows is not None, "a request with images was refused"
            tokens = images.substitute(start, tokens, self._image_rows.model.first_image_id)
        return Chunk(start, tokens)

    def _image_inputs(
        self, table: SlotTable, decode_rows: np.ndarray, chunks: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """What a step with chunks carries for a model that takes images, by the field of `Step`."""
        if not chunks or self._image_rows is None:
            return {}
        inputs = {"rope_offsets": self._rope_offsets(table, decode_rows, chunks)} if self._has_rope else {}
        if self._image_rows.model.both_ways:
            inputs["lookahead"] = self._lookahead(table, decode_rows, chunks)
        return inputs

    def _rope_offsets(self, table: SlotTable, decode_rows: np.ndarray, chunks: Sequence[tuple[int, int]]) -> np.ndarray:
        """What each axis adds to the positions of a step with chunks, int32 `[axes, tokens]`, after `num_computed` has advanced."""
        assert self._image_rows is not None
        axes = self._image_rows.model.rope_axes
        parts = [np.broadcast_to(self._image_rows.rope_delta[decode_rows], (axes, len(decode_rows)))]
        for slot, size in chunks:
            state, end = table.state_of(slot), int(table.num_computed[slot])
            if state.images is None:
                parts.append(np.zeros((axes, size), np.int32))
            else:
                parts.append(state.images.rope_offsets(end - size, size, state.rope_delta))
        return np.concatenate(parts, axis=1)

    def _lookahead(self, table: SlotTable, decode_rows: np.ndarray, chunks: Sequence[tuple[int, int]]) -> np.ndarray:
        """`Step.lookahead` of a step with chunks, after `num_computed` has advanced."""
        parts = [np.zeros(len(decode_rows), np.int32)]
        for slot, size in chunks:
            images, end = table.state_of(slot).images, int(table.num_computed[slot])
            parts.append(np.zeros(size, np.int32) if images is None else images.lookahead(end - size, size))
        return np.concatenate(parts)

    def clear(self) -> None:
        """Discard the pending updates."""
        self.steps_before_alloc = 0
        self._chunk_slots.clear()
        self._updates.take()


def _logprob_rows(table: SlotTable, slots: np.ndarray, emits: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Rows with log-probabilities, and the largest number of most likely tokens that one of them reports."""
    rows = (table.needs_host_work[slots] & emits).nonzero()[0]
    if not rows.size:
        return None
    counts = [table.state_of(int(slots[row])).num_logprobs for row in rows]
    entries = [(row, count) for row, count in zip(rows, counts, strict=True) if count >= 0]
    if not entries:
        return None
    return np.array([row for row, _ in entries]), max(count for _, count in entries)
