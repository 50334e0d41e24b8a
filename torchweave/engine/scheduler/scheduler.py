"""Continuous batching: build steps from requests, and responses from step results. No thread, no device, no clock.

Facts about running requests are arrays over slots, so a step costs the same few array operations for any number of requests.
Python runs per request only when a request starts, finishes, is paused, streams, or has log-probabilities or a grammar.

Steps are built ahead of results: the tokens of a step are unknown when the next one is built, but lengths and positions are not.
A request that the device ends early (a stop token) is therefore part of up to `run_ahead - 1` further steps; its slot and blocks
are released, and its final response is sent, when the last of them has completed. A paused request leaves in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.image_rows import ImageRows, PromptImages
from torchweave.engine.kv_cache.prefix_index import NO_HIT, PrefixHit
from torchweave.engine.kv_cache.state_snapshots import StateSnapshots
from torchweave.engine.request import (
    INVALID_LOGITS,
    FinishReason,
    InferenceRequest,
    Output,
    Response,
    Responses,
    refusal,
)
from torchweave.engine.sampling.beam_search import BeamSearch, num_candidates
from torchweave.engine.sampling.structured_output import GrammarManager
from torchweave.engine.scheduler.beams import BeamGroup, beam_response
from torchweave.engine.scheduler.limits import Limits, conflicting_fields
from torchweave.engine.scheduler.policies import Decision, Policy, should_delay_prefill, static_batch
from torchweave.engine.scheduler.pooled_rows import pooled_response, store_pooled
from torchweave.engine.scheduler.prompt_logprobs import store_prompt_logprobs
from torchweave.engine.scheduler.request_state import RequestState, WaitingQueue
from torchweave.engine.scheduler.running_set import RunningSet
from torchweave.engine.scheduler.snapshot import blocks_needed, take_snapshot
from torchweave.engine.scheduler.speculation import AdaptiveDrafts, SpeculationCounts, unused_tokens
from torchweave.engine.scheduler.step import Step, StepLogprobs, StepResult
from torchweave.engine.scheduler.step_builder import StepBuilder
from torchweave.images import ImageLimits
from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN
from torchweave.ops.slot_state import MAX_STOP_IDS, NOT_EMITTED, SlotUpdates

StateChange = Literal["started", "paused", "answering"]
_log = logging.getLogger("torchweave")


class Scheduler:
    """Owner of all requests: `schedule` returns the next step, `update` takes its result and returns responses.

    The waiting requests are in a queue, the running ones in a `RunningSet`, their blocks in `kv`. The policy decides on a
    snapshot; the scheduler carries the decision out.

    Args:
        limits: sizes of steps and requests, and how a step's tokens are divided among prompts.
        kv: block manager of the KV cache.
        policy: decides which waiting requests start, which running ones pause, and how much of each prompt is prefilled.
        updates: collects updates of device state for the next step.
        eos_token_ids: end-of-sequence tokens of the model.
        reuse: requests with a common prefix share KV cache blocks.
        grammars: grammars of structured outputs; None if the model has no tokenizer.
        image_rows: the pool of images; None for a model without images.
        adaptive_drafts: selects the number of drafts of each step; None: as many as the limits allow.

    Attributes:
        paused_total: number of pauses so far.
        state_changes: (id, state) in order, until a caller takes them: `started` prefill (again, after a pause), `paused` and
            lost its blocks, or `answering`, with its first token.
        num_invalid: number of requests that ended because their logits were not finite.
        static: the policy is `static_batch`.
        static_batch_size: requests that the current static batch began with.
        speculation: drafts so far, and how many were kept.
    """

    def __init__(
        self,
        limits: Limits,
        kv: BlockManager,
        policy: Policy,
        updates: SlotUpdates,
        eos_token_ids: Iterable[int] = (),
        reuse: bool = True,
        grammars: GrammarManager | None = None,
        image_rows: ImageRows | None = None,
        adaptive_drafts: AdaptiveDrafts | None = None,
    ) -> None:
        self.limits = limits
        self.image_rows = image_rows
        self.kv = kv
        self.grammars = grammars
        self.paused_total = 0
        self.num_invalid = 0
        self.state_changes: list[tuple[int, StateChange]] = []
        self.static = policy is static_batch
        self.static_batch_size = 0
        self.speculation = SpeculationCounts(limits.query_len - 1)
        self._policy = policy
        self._eos = tuple(eos_token_ids)
        self._running = RunningSet(limits.max_batch_size, reuse, limits.has_recurrent_states)
        self._step_builder = StepBuilder(limits, updates, image_rows, adaptive_drafts)
        self._adaptive_drafts = adaptive_drafts
        self._waiting = WaitingQueue(limits.priority_order)
        self._waiting_for_grammar: dict[int, RequestState] = {}  # by id; before the start or after a pause
        self._num_arrivals = 0
        self._num_delayed_steps = 0  # consecutive steps without prefill although prompts wait

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests without a final response."""
        return len(self._running.slots.slot_of) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._waiting_for_grammar)

    @property
    def num_paused(self) -> int:
        """Paused requests that wait to run again."""
        done = self._running.slots.done
        pending_release = sum(not done[slot] for slot in self._running.pending_release)
        waiting_for_grammar = sum(state.paused for state in self._waiting_for_grammar.values())
        return pending_release + self._waiting.num_paused + waiting_for_grammar

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for blocks from host memory."""
        return self.kv.host is not None and self.kv.host.is_loading

    def has_request(self, request_id: int) -> bool:
        running = request_id in self._running.slots.slot_of
        return running or request_id in self._waiting or request_id in self._waiting_for_grammar

    @property
    def image_limits(self) -> ImageLimits:
        """How prompts with images are encoded for this model."""
        rows, reason = self.image_rows, self.limits.no_images
        return ImageLimits(reason=reason) if rows is None else ImageLimits(rows.model.token_id, rows.max_images)

    def rejection_reason(self, request: InferenceRequest) -> str:
        """Why a request can never run, in a sentence; empty if it can. Safe to call from any thread."""
        if request.sampling.structured_outputs is not None and self.grammars is None:
            return "structured_outputs needs a tokenizer, but this model has none; leave structured_outputs out."
        why = conflicting_fields(request.sampling, self._eos) or self.limits.rejection_reason(request, self.kv)
        if why or not request.images:
            return why
        if self.image_rows is None:
            return f"The prompt has images, but this model is served without: {self.limits.no_images}."
        if self.image_rows.model.both_ways and request.sampling.prompt_logprobs is not None:
            return "prompt_logprobs is not supported for this model's prompts with images; leave prompt_logprobs out."
        return self.image_rows.rejection_reason(np.asarray(request.input_ids), request.images)

    def add(self, request: InferenceRequest, seed: int) -> None:
        """Add a request without a `rejection_reason`; `seed` is for requests without a seed."""
        params = request.sampling
        stops = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos))))
        state = RequestState(
            request=request,
            seed=seed if params.seed is None else params.seed,
            arrival=self._num_arrivals,
            prompt=np.array(request.input_ids, np.int32),  # a copy: the client may reuse its array
            stops=stops,
            host_stop_ids=frozenset(stops[MAX_STOP_IDS:]),
            num_logprobs=params.num_logprobs(self.limits.vocab_size),
            num_prompt_logprobs=params.num_prompt_logprobs(self.limits.vocab_size),
        )
        if request.images:
            assert self.image_rows is not None, "a request with images was refused"
            offsets, state.rope_delta = self.image_rows.model.rope_offsets(state.prompt, request.images)
            state.images = PromptImages(request.images, offsets, self.image_rows.model.both_ways)
        if params.beam_width > 1:
            max_tokens = self.limits.last_position(request) + 1 - len(state.prompt)
            state.search = BeamSearch(params, frozenset(stops), max_tokens)
            state.num_logprobs = max(num_candidates(params, len(stops)), state.num_logprobs)
            state.host_stop_ids = frozenset()
        self._num_arrivals += 1
        if params.structured_outputs is None:
            self._waiting.add(state)
        else:
            assert self.grammars is not None
            state.constraint = self.grammars.constraint(params, stops)
            self._waiting_for_grammar[request.id] = state

    def cancel(self, request_id: int) -> list[Response]:
        """Cancel a request. Its final response is returned here or, if a step in flight contains it, from `update`."""
        slots = self._running.slots
        slot = slots.slot_of.get(request_id)
        if slot is not None:
            if not slots.done[slot]:
                self._finish(slot, "cancelled")
            return self._release()
        state = self._waiting.remove(request_id) or self._waiting_for_grammar.pop(request_id, None)
        if state is None:
            return []
        state.reason = "cancelled"
        return [_final_response(state)]

    def abort_all(self, message: str) -> list[Response]:
        """Answer every request with an error and discard it: the device failed, or the engine shuts down."""
        waiting = [*(state.request.id for state in self._waiting), *self._waiting_for_grammar]
        ids = [*self._running.slots.slot_of, *waiting]
        self._running.clear(self.kv)
        self.kv.reset()  # after a failure of the device the blocks' contents are unknown
        self._waiting.clear()
        self._waiting_for_grammar.clear()
        self._step_builder.clear()
        return [refusal(request_id, message) for request_id in ids]

    def poll_grammars(self) -> list[Response]:
        """Resume requests whose grammar is ready; returns the responses of those that end with it."""
        responses, running = [], self._running
        for state in list(self._waiting_for_grammar.values()):
            assert state.constraint is not None
            if not state.constraint.ready:
                continue
            del self._waiting_for_grammar[state.request.id]
            if _ended_by_grammar(state):
                responses.append(_final_response(state))
            else:
                self._waiting.add(state)
        skipped, slots = running.logits_processors.skipped, running.slots
        for slot, constraint in list(running.logits_processors.constraints.items()):
            if skipped[slot] and not slots.done[slot] and constraint.ready and not running.in_flight(slot):
                skipped[slot] = False
                state = slots.state_of(slot)
                if _ended_by_grammar(state) and state.reason is not None:
                    self._finish(slot, state.reason)
        return responses + self._release() if running.pending_release else responses

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step; None if no request can run before a step in flight has completed."""
        running, build = self._running, self._step_builder.build
        self._step_builder.cache_chunks(running, self.kv)
        only_decode = not (self._waiting or running.prefill or running.beams.groups)
        if only_decode and (self._step_builder.steps_before_alloc or not running.decoding.size):
            decoding = self._rows_of_step(running.decoding, alone=True)
            return build(running, self.kv, decoding) if decoding.size else None
        while True:
            self._free_out_of_window()
            decision = self._decide()
            decoding, searches, chunks = running.decoding, running.searches, []
            if decision is not None:
                chunks = [(slot, size) for slot, size in zip(running.prefill, decision.chunks, strict=True) if size]
                if decision.skipped or decision.paused:
                    decoding, searches = self._apply_pauses(decision)
                chunks += [(self._start(self._waiting.pop()), size) for size in decision.admitted]
                if self.static and decision.admitted:
                    self.static_batch_size = running.decoding.size + len(running.prefill)
                ready = [(slot, size) for slot, size in chunks if self.kv.ready(slot)]
                chunks = [(slot, running.slots.state_of(slot).chunk_size(size)) for slot, size in ready]
                if self.kv.snapshots is not None and self.limits.chunked_context:
                    chunks = self._cut_at_snapshots(chunks, self.kv.snapshots)
                if self.image_rows is not None:
                    room = self.limits.max_num_tokens - decoding.size - sum(group.num_rows for group in searches)
                    chunks = self._with_images(chunks, room, self.image_rows)
            searches = [group for group in searches if group.num_rows]
            decoding = self._rows_of_step(decoding, alone=not (chunks or searches))
            if chunks or searches or decoding.size:
                return build(running, self.kv, decoding, chunks, searches)
            if not (decision and decision.paused) or any(running.in_flight(slot) for slot in running.pending_release):
                return None
            responses = self._release()  # no step in flight has the paused requests: their blocks can be used at once
            assert not responses, "finished requests are released when their last step has completed"

    def _cut_at_snapshots(self, chunks: list[tuple[int, int]], snapshots: StateSnapshots) -> list[tuple[int, int]]:
        """The chunks, cut where the recurrent state is kept for later requests."""
        slots = self._running.slots
        return [
            (slot, snapshots.chunk_size(slot, int(slots.num_computed[slot]), size, int(slots.prefill_len[slot])))
            for slot, size in chunks
        ]

    def _with_images(self, chunks: list[tuple[int, int]], room: int, image_rows: ImageRows) -> list[tuple[int, int]]:
        """The chunks, cut where the pool has no room for an image, and around images whose tokens see each other.

        `room` is that of the step in tokens: where the first chunk grows, later ones shrink. A request whose image cannot be
        encoded ends.
        """
        image_rows.begin_step()
        fitting, table = [], self._running.slots
        for slot, size in chunks:
            state, size = table.state_of(slot), min(size, room)
            try:
                if state.images is not None:
                    size = state.images.fit(int(table.num_computed[slot]), size, room, image_rows)
            except ValueError as error:
                state.error = str(error)
                self._finish(slot, "error")
                continue
            if size:
                fitting.append((slot, size))
                room -= size
        return fitting

    def _rows_of_step(self, decoding: np.ndarray, alone: bool) -> np.ndarray:
        """The decode slots of the next step: one micro-batch of those that do not wait for a token mask."""
        running, num_micro_batches = self._running, self.limits.num_micro_batches
        if running.logits_processors.constraints:
            decoding = decoding[~running.logits_processors.skipped[decoding]]
        if num_micro_batches == 1:
            return decoding
        return decoding[running.micro_batch(decoding, self._step_builder.next_index, num_micro_batches, alone)]

    def _free_out_of_window(self) -> None:
        """Free the blocks that have left the attention window of a running request."""
        if self.kv.has_windows:
            running = self._running
            slots = [*running.decoding.tolist(), *running.prefill]
            slots += [slot for group in running.searches for slot in group.continued_slots]
            slots = np.array(slots, np.int64)
            self.kv.free_out_of_window(slots, running.slots.num_known(slots))

    def _decide(self) -> Decision | None:
        """The policy's decision; None if all requests decode and have the blocks they need."""
        running, kv, limits = self._running, self.kv, self.limits
        needed = blocks_needed(running, kv, limits.query_len)
        if not self._waiting and not running.prefill and needed.sum() <= kv.free_logical_blocks:
            return None
        in_step = None
        if limits.num_micro_batches > 1:
            in_step = running.micro_batch(running.decoding, self._step_builder.next_index, limits.num_micro_batches)
        snapshot = take_snapshot(limits, running, kv, needed, self._waiting, self._find_prefix, in_step)
        decision = self._policy(snapshot)
        if not should_delay_prefill(
            snapshot, self._num_delayed_steps, limits.batch_wait_timeout_iters, limits.batch_wait_max_tokens_ratio
        ):
            self._num_delayed_steps = 0
            return decision
        self._num_delayed_steps += 1
        return replace(decision, chunks=(0,) * len(snapshot.prefill), admitted=())

    def _find_prefix(self, state: RequestState) -> PrefixHit:
        return state.find_prefix(self.kv) if self._running.reuse else NO_HIT

    def _start(self, state: RequestState) -> int:
        """Give a waiting request a slot, the blocks of its cached prefix, and its state on the device."""
        running, kv = self._running, self.kv
        self.state_changes.append((state.request.id, "started"))
        hit, state.prefix_hit = self._find_prefix(state), None
        state.pooled = None
        last_position = self.limits.last_position(state.request)
        num_cached_tokens = hit.num_blocks * kv.block_size
        slot = running.slots.allocate(state, last_position, num_cached_tokens)
        if not state.paused:
            state.num_cached_tokens = num_cached_tokens
        if hit.num_blocks:
            self._step_builder.write_blocks(kv.attach(slot, hit))
        if kv.snapshots is not None:
            kv.snapshots.begin(slot, hit, state.prefill_len)
        kv.missed_total += state.prefill_len // kv.block_size - hit.num_blocks
        kv.reserve(slot, last_position)
        running.prefill.append(slot)
        if state.constraint is not None or state.processor_flags:
            running.logits_processors.start(slot, state)
        if self.image_rows is not None:
            self.image_rows.rope_delta[slot] = state.rope_delta
        searching = state.search is not None
        for each in running.beams.start(running.slots, kv, slot, state).slots if searching else (slot,):
            self._step_builder.write_request(each, state)
            if self.limits.query_len > 1:
                drafting = not (searching or running.slots.needs_host_work[slot] or state.processor_flags)
                running.slots.drafting[each] = drafting
                self._step_builder.write_history(each, state, last_position, drafting, num_cached_tokens)
                if self._adaptive_drafts is not None:
                    self._adaptive_drafts.start(each)
        return slot

    def _apply_pauses(self, decision: Decision) -> tuple[np.ndarray, list[BeamGroup]]:
        """Pause requests; returns the decode slots and the searches that are neither paused nor skipped."""
        running = self._running
        decoding, searches = running.decoding, running.searches
        slots = [*decoding.tolist(), *(group.leader for group in searches), *running.prefill]
        for index in decision.paused:
            running.stop(slots[index])
            self.state_changes.append((running.slots.state_of(slots[index]).request.id, "paused"))
        self.paused_total += len(decision.paused)
        runs = np.ones(len(slots), bool)
        runs[[*decision.skipped, *decision.paused]] = False
        first = len(decoding)
        return decoding[runs[:first]], [group for index, group in enumerate(searches, start=first) if runs[index]]

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, step: Step, result: StepResult) -> Responses:
        """Process the result of a step; returns the responses for it."""
        self._running.completed = step.index
        table = self._running.slots
        if self._adaptive_drafts is not None and result.seconds is not None and not (step.chunks or step.catch_up):
            self._adaptive_drafts.costs.add(step.num_rows, step.query_len, result.seconds)
        if step.prompt_targets is not None and result.prompt_logprobs is not None:
            store_prompt_logprobs(step.prompt_targets, result.prompt_logprobs, table.state)
        if result.pooled is not None:
            store_pooled(step, result.pooled, table, self.limits.pooling)
        rows = (step.emits & ~table.done[step.slots]).nonzero()[0]
        if (invalid := result.tokens[rows] == INVALID_TOKEN).any():
            self._end_invalid(step.slots[rows[invalid if invalid.ndim == 1 else invalid.any(axis=1)]])
            rows = rows[~table.done[step.slots[rows]]]
        if self._running.beams.groups:
            rows = self._update_beams(step, rows, result)
        slots = step.slots[rows]
        counts = table.num_generated[slots]
        tokens, stopped = (
            self._store_drafted(step, result, rows) if step.query_len > 1 else self._store(result, slots, rows)
        )

        if step.chunks:
            self.state_changes.extend((each, "answering") for each in table.ids[slots[counts == 0]].tolist())
        needs_host_work = table.needs_host_work[slots]
        if any_host_work := bool(needs_host_work.any()):
            stopped = stopped | self._update_on_host(slots, tokens, needs_host_work, rows, result.logprobs)
        ended = stopped | (table.prompt_len[slots] + table.num_generated[slots] > table.limit[slots])
        for slot, by_stop in zip(slots[ended], stopped[ended], strict=True):
            self._finish(int(slot), "stop" if by_stop else "length")
        if step.query_len > 1 and self._running.take_back(step.slots, unused_tokens(step, result, table)):
            self._step_builder.steps_before_alloc = 0
        if any_host_work and self._running.logits_processors.constraints:
            self._advance_grammars(slots[needs_host_work & ~ended], tokens[needs_host_work & ~ended])

        streamed = table.streaming[slots] & ~ended
        responses = Responses()
        if streamed.any():
            plain = streamed & ~needs_host_work & (table.num_sent[slots] == table.num_generated[slots] - 1)
            table.num_sent[slots[plain]] += 1
            others = (self._make_response(int(slot)) for slot in slots[streamed & ~plain])
            responses = Responses(others, table.ids[slots[plain]], tokens[plain])
        responses.extend(self._release())
        return responses

    def _end_invalid(self, slots: np.ndarray) -> None:
        """End requests whose logits are not finite with an error."""
        table = self._running.slots
        for slot in slots.tolist():
            if table.done[slot]:  # with another beam of its search
                continue
            self.num_invalid += 1
            if self.num_invalid & (self.num_invalid - 1) == 0:  # 1, 2, 4, ...: a broken model ends all requests
                _log.warning(
                    "Request %d ended with an error: %s (%d such requests so far)",
                    table.ids[slot], INVALID_LOGITS, self.num_invalid,
                )  # fmt: skip
            group = self._running.search_of(slot)
            leader = slot if group is None else group.leader
            table.state_of(leader).error = INVALID_LOGITS
            self._finish(leader, "error")
        if not self.is_loading:
            self.kv.reset()  # cached blocks may hold the cause

    def _store(self, result: StepResult, slots: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append the token of each row to its slot's; returns the tokens, and the rows that the device has stopped."""
        table, tokens = self._running.slots, result.tokens[rows]
        stopped = tokens < 0
        tokens = np.maximum(tokens, -1 - tokens)
        counts = table.num_generated[slots]
        table.grow_tokens(int(counts.max(initial=0)) + 1)
        table.tokens[slots, counts] = tokens
        table.num_generated[slots] = counts + 1
        return tokens, stopped

    def _store_drafted(self, step: Step, result: StepResult, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for a step with drafts; returns the last token of each row."""
        table, slots, tokens = self._running.slots, step.slots[rows], result.tokens[rows]
        lengths = (tokens != NOT_EMITTED).sum(axis=1)
        assert result.num_drafts is not None
        self.speculation.add(result.num_drafts[rows], lengths)
        if self._adaptive_drafts is not None:
            drafting = table.drafting[slots]
            self._adaptive_drafts.update(slots[drafting], step.query_len, lengths[drafting] - 1)
        last = tokens[np.arange(len(rows)), lengths - 1]
        tokens = np.where(tokens < 0, -1 - tokens, tokens)
        counts = table.num_generated[slots]
        table.grow_tokens(int((counts + lengths).max(initial=0)))
        row, place = np.nonzero(np.arange(tokens.shape[1]) < lengths[:, None])
        table.tokens[slots[row], counts[row] + place] = tokens[row, place]
        table.num_generated[slots] = counts + lengths
        return np.where(last < 0, -1 - last, last), last < 0

    def _update_beams(self, step: Step, rows: np.ndarray, result: StepResult) -> np.ndarray:
        """Process the rows of beam searches; returns the other rows."""
        slots = self._running.slots
        searching = slots.group[step.slots[rows]] >= 0
        if searching.any():
            assert result.logprobs is not None
            beam_rows = rows[searching]
            finished = self._running.beams.update(slots, self.kv, step.slots[beam_rows], beam_rows, result.logprobs)
            for group in finished:
                self._finish(group.leader, group.search.best()[0].finish_reason)
        return rows[~searching]

    def _update_on_host(
        self,
        slots: np.ndarray,
        tokens: np.ndarray,
        needs_host_work: np.ndarray,
        rows: np.ndarray,
        logprobs: StepLogprobs | None,
    ) -> np.ndarray:
        """Store log-probabilities and check stop tokens beyond the device's table; returns the rows that these stop."""
        table = self._running.slots
        stopped = np.zeros(len(slots), bool)
        entry_of_row = {int(row): i for i, row in enumerate(logprobs.rows)} if logprobs is not None else {}
        for i in np.flatnonzero(needs_host_work):
            state = table.state_of(int(slots[i]))
            token = int(tokens[i])
            num_generated = int(table.num_generated[slots[i]])
            stopped[i] = token in state.host_stop_ids and num_generated > state.request.sampling.min_tokens
            if state.num_logprobs >= 0 and logprobs is not None:
                state.logprobs.append(logprobs.entry(entry_of_row[int(rows[i])], token, state.num_logprobs))
        return stopped

    def _advance_grammars(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        constraints = [self._running.slots.state_of(int(slot)).constraint for slot in slots]
        sampled = [(each, int(token)) for each, token in zip(constraints, tokens, strict=True) if each is not None]
        if sampled:
            assert self.grammars is not None
            self.grammars.advance(sampled)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        slots = self._running.slots
        group = self._running.search_of(slot)
        slots.state_of(slot).reason = reason
        slots.done[slot if group is None else group.slots] = True
        self._running.stop(slot)

    def _make_response(self, slot: int) -> Response:
        """The tokens and log-probabilities of a slot that were not sent yet."""
        table, state = self._running.slots, self._running.slots.state_of(slot)
        num_generated = int(table.num_generated[slot])
        tokens = table.tokens[slot, int(table.num_sent[slot]) : num_generated].copy()
        table.num_sent[slot] = num_generated
        if state.pooled is not None:
            return pooled_response(state)
        logprobs, state.logprobs = tuple(state.logprobs), []
        prompt_logprobs, state.prompt_logprobs = tuple(state.prompt_logprobs), []
        num_cached_tokens = state.num_cached_tokens if state.reason is not None else 0
        output = Output(tokens, state.reason, logprobs, prompt_logprobs, num_cached_tokens=num_cached_tokens)
        return Response(state.request.id, output, state.reason is not None, state.error)

    def _release(self) -> list[Response]:
        """Release the slots that no step in flight contains: finished requests get their final response, paused ones wait."""
        responses, running, table = [], self._running, self._running.slots
        for slot in [slot for slot in running.pending_release if not running.in_flight(slot)]:
            running.pending_release.remove(slot)
            state, num_generated = table.state_of(slot), int(table.num_generated[slot])
            if state.search is None and not state.error:
                # The last token was sampled but not fed: its key and value are in no block.
                num_cached = min(int(table.num_computed[slot]), len(state.prompt) + max(num_generated - 1, 0))
                running.cache_full_blocks(self.kv, slot, num_cached)
            if state.reason is not None:
                beams = state.search is not None and not state.error
                responses.append(beam_response(state) if beams else self._make_response(slot))
            else:
                self._wait_again(slot, state)
            running.release(self.kv, slot)
        return responses

    def _wait_again(self, slot: int, state: RequestState) -> None:
        """Return a paused request to the queue, with its generated tokens."""
        table = self._running.slots
        state.paused = True
        if state.search is None:
            state.generated = table.tokens[slot, : int(table.num_generated[slot])].copy()
            state.num_sent = int(table.num_sent[slot])
        else:
            state.generated = state.search.beams[0].tokens
        if state.constraint is None:
            self._waiting.add(state)
        else:
            self._waiting_for_grammar[state.request.id] = state

    def check(self) -> None:
        """Raise AssertionError unless slots, requests and blocks agree, as they do between two steps."""
        self._running.check(self.kv)


def _ended_by_grammar(state: RequestState) -> bool:
    """Whether a request ends because its grammar is complete or has failed."""
    assert state.constraint is not None
    state.error = state.constraint.error
    if state.error or state.constraint.complete:
        state.reason = "error" if state.error else "complete"
    return state.reason is not None


def _final_response(state: RequestState) -> Response:
    """The final response to a request that is not running."""
    if state.search is not None:
        return beam_response(state)
    tokens, logprobs = state.generated[state.num_sent :], tuple(state.logprobs)
    prompt_logprobs = tuple(state.prompt_logprobs)
    output = Output(tokens, state.reason, logprobs, prompt_logprobs, num_cached_tokens=state.num_cached_tokens)
    return Response(state.request.id, output, final=True, error=state.error)
