"""Continuous batching: build steps from requests, and responses from step results. No thread, no device, no clock.

Facts about running requests are arrays over slots, so a step costs the same few array operations for any number of requests.
Python runs per request only when a request starts, finishes, is paused, streams, or uses a part that needs it. What a step carries
beyond decoding is the work of parts (`torchweave.engine.scheduler.parts`); a step asks those that running requests use.

Steps are built ahead of results: the tokens of a step are unknown when the next one is built, but lengths and positions are not.
A request that the device ends early (a stop token) is therefore part of up to `run_ahead - 1` further steps; its slot and blocks
are released, and its final response is sent, when the last of them has completed. A paused request leaves in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.request import INVALID_LOGITS, FinishReason, InferenceRequest, Response, Responses, refusal
from torchweave.engine.scheduler.decider import Decider
from torchweave.engine.scheduler.limits import Limits, conflicting_fields
from torchweave.engine.scheduler.parts.base import Host, Parts, Resources, StoredRows
from torchweave.engine.scheduler.policies import Decision, Policy, static_batch
from torchweave.engine.scheduler.request_state import RequestState, WaitingQueue
from torchweave.engine.scheduler.running_set import RunningSet, SlotGroup
from torchweave.engine.scheduler.speculation import SpeculationCounts
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.engine.scheduler.step_builder import StepBuilder
from torchweave.images import ImageLimits
from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN
from torchweave.ops.slot_state import SlotUpdates

StateChange = Literal["started", "paused", "answering"]
_log = logging.getLogger("torchweave")
_NO_RESPONSES = Responses()


class Scheduler:
    """Owner of all requests: `schedule` returns the next step, `update` takes its result and returns responses.

    The waiting requests are in a queue, the running ones in a `RunningSet`, their blocks in `kv`; a `Decider` asks the policy.

    Args:
        limits: sizes of steps and requests, and how a step's tokens are divided among prompts.
        kv: block manager of the KV cache.
        policy: decides which waiting requests start, which running ones pause, and how much of each prompt is prefilled.
        updates: collects updates of device state for the next step.
        eos_token_ids: end-of-sequence tokens of the model.
        reuse: requests with a common prefix share KV cache blocks.
        resources: what the model and the options bring for parts.

    Attributes:
        parts: what steps can carry beyond decoding.
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
        resources: Resources | None = None,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.resources = Resources() if resources is None else resources
        self.paused_total = self.num_invalid = self.static_batch_size = 0
        self.state_changes: list[tuple[int, StateChange]] = []
        self.static = policy is static_batch
        self.speculation = SpeculationCounts(limits.query_len - 1)
        self._eos = tuple(eos_token_ids)
        self._running = RunningSet(limits.max_batch_size, reuse)
        self._waiting = WaitingQueue(limits.priority_order)
        shared = limits, kv, self._running, updates, self._waiting
        self.parts = Parts(Host(*shared, self.resources, self.speculation, self._finish))
        self._decider = Decider(limits, kv, self._running, self._waiting, policy)
        self._step_builder = StepBuilder(limits, updates, self.parts)
        self._num_arrivals = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests without a final response."""
        return len(self._running.slots.slot_of) + self.num_waiting

    @property
    def request_ids(self) -> list[int]:
        """Ids of the requests without a final response."""
        return [*self._running.slots.slot_of, *self._waiting.ids]

    def admit_new(self, admit: bool) -> None:
        """Whether waiting requests start that have not run before."""
        self._waiting.only_paused = not admit

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._waiting.held)

    @property
    def num_paused(self) -> int:
        """Paused requests that wait to run again."""
        done = self._running.slots.done
        pending_release = sum(not done[slot] for slot in self._running.pending_release)
        return pending_release + self._waiting.num_paused

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for blocks from host memory."""
        return self.kv.host is not None and self.kv.host.is_loading

    def has_request(self, request_id: int) -> bool:
        return request_id in self._running.slots.slot_of or request_id in self._waiting

    @property
    def image_limits(self) -> ImageLimits:
        """How prompts with images are encoded for this model."""
        rows, reason = self.resources.image_rows, self.limits.no_images
        return ImageLimits(reason=reason) if rows is None else ImageLimits(rows.model.token_id, rows.max_images)

    def rejection_reason(self, request: InferenceRequest) -> str:
        """Why a request can never run, in a sentence; empty if it can. Safe to call from any thread."""
        if why := conflicting_fields(request.sampling, self._eos) or self.limits.rejection_reason(request):
            return why
        reasons = (part.rejection_reason(request) for part in self.parts.held.values())
        return next(filter(None, reasons), "") or self.limits.blocks_rejection(request, self.kv)

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits of later requests."""
        self.limits = limits
        for part in self.parts.held.values():
            part.host = replace(part.host, limits=limits)

    def add(self, request: InferenceRequest, seed: int) -> None:
        """Add a request without a `rejection_reason`; `seed` is for requests without a seed."""
        state = RequestState.of(request, seed, self._num_arrivals, self._eos, self.limits.vocab_size)
        for part in self.parts.held.values():
            part.add(state)
        self._num_arrivals += 1
        self._waiting.add(state)

    def cancel(self, request_id: int) -> list[Response]:
        """Cancel a request. Its final response is returned here or, if a step in flight contains it, from `update`."""
        slots = self._running.slots
        slot = slots.slot_of.get(request_id)
        if slot is not None:
            if not slots.done[slot]:
                self._finish(slot, "cancelled")
            return self._release()
        state = self._waiting.remove(request_id)
        if state is None:
            return []
        state.reason = "cancelled"
        return [self._final_response(state)]

    def pause_running(self) -> None:
        """Pause every running request, while no step is in flight: each starts again with its tokens, and no block is in use."""
        for slot in self._running.slots.slot_of.values():
            if not self._running.slots.done[slot]:
                self._pause(slot)
        responses = self._release()
        assert not responses, "finished requests are released when their last step has completed"

    def abort_all(self, message: str) -> list[Response]:
        """Answer every request with an error and discard it: the device failed, or the engine shuts down."""
        ids = self.request_ids
        self.parts.clear()
        self._running.clear(self.kv)
        self.kv.reset()  # after a failure of the device the blocks' contents are unknown
        self._waiting.clear()
        self._step_builder.clear()
        return [refusal(request_id, message) for request_id in ids]

    def poll_parts(self) -> list[Response]:
        """Look at what parts wait for, such as grammars; returns the responses of requests that end with it."""
        responses: list[Response] = []
        for part in self.parts.held.values():
            if part.has_events:
                responses += [self._final_response(state) for state in part.poll()]
        return responses + self._release() if self._running.pending_release else responses

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step; None if no request can run before a step in flight has completed."""
        running, build = self._running, self._step_builder.build
        self._step_builder.cache_chunks(running, self.kv)
        only_decode = not (self._waiting.entries or running.prefill or running.groups)
        if only_decode and (running.steps_before_alloc or not running.decoding.size):
            decoding = self._step_builder.rows_of_step(running, running.decoding, alone=True)
            return build(running, self.kv, decoding) if decoding.size else None
        while True:
            running.free_out_of_window(self.kv)
            decision = self._decider.decide(self._step_builder.next_index)
            decoding, groups, chunks = running.decoding, running.decoding_groups, []
            if decision is not None:
                chunks = [(slot, size) for slot, size in zip(running.prefill, decision.chunks, strict=True) if size]
                if decision.skipped or decision.paused:
                    decoding, groups = self._apply_pauses(decision)
                chunks += [(self._start(self._waiting.pop()), size) for size in decision.admitted]
                if self.static and decision.admitted:
                    self.static_batch_size = running.decoding.size + len(running.prefill)
                chunks = [(slot, size) for slot, size in chunks if self.kv.ready(slot)]
                room = self.limits.max_num_tokens - decoding.size - sum(group.num_rows for group in groups)
                for part in self.parts.active:
                    chunks = part.fit(chunks, room)
            groups = [group for group in groups if group.num_rows]
            decoding = self._step_builder.rows_of_step(running, decoding, alone=not (chunks or groups))
            if chunks or groups or decoding.size:
                return build(running, self.kv, decoding, chunks, groups)
            if not (decision and decision.paused) or any(running.in_flight(slot) for slot in running.pending_release):
                return None
            responses = self._release()  # no step in flight has the paused requests: their blocks can be used at once
            assert not responses, "finished requests are released when their last step has completed"

    def _start(self, state: RequestState) -> int:
        """Give a waiting request a slot, the blocks of its cached prefix, and its state on the device."""
        running, kv = self._running, self.kv
        self.state_changes.append((state.request.id, "started"))
        hit, state.prefix_hit = self._decider.find_prefix(state), None
        last_position = self.limits.last_position(state.request)
        num_cached_tokens = hit.num_blocks * kv.block_size
        slot = running.slots.allocate(state, last_position, num_cached_tokens)
        if not state.paused:
            state.num_cached_tokens = num_cached_tokens
        if hit.num_blocks:
            self._step_builder.write_blocks(kv.attach(slot, hit))
        kv.missed_total += state.prefill_len // kv.block_size - hit.num_blocks
        kv.reserve(slot, last_position)
        running.prefill.append(slot)
        self.parts.start(slot, state, hit)
        for each in running.slots_of(slot):
            self._step_builder.write_request(each, state)
        return slot

    def _apply_pauses(self, decision: Decision) -> tuple[np.ndarray, Sequence[SlotGroup]]:
        """Pause requests; returns the decode slots and the groups that are neither paused nor skipped."""
        running, slots = self._running, self._running.decision_slots
        others = running.all_but({*decision.skipped, *decision.paused})
        for index in decision.paused:
            self._pause(slots[index])
        return others

    def _pause(self, slot: int) -> None:
        self._running.stop(slot)
        self.state_changes.append((self._running.slots.state_of(slot).request.id, "paused"))
        self.paused_total += 1

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, step: Step, result: StepResult) -> Responses:
        """Process the result of a step; returns the responses for it."""
        self._running.completed = step.index
        table = self._running.slots
        rows = (step.emits & ~table.done[step.slots]).nonzero()[0]
        if (invalid := result.tokens[rows] == INVALID_TOKEN).any():
            self._end_invalid(step.slots[rows[invalid if invalid.ndim == 1 else invalid.any(axis=1)]])
            rows = rows[~table.done[step.slots[rows]]]
        active = self.parts.active
        for part in active:
            rows = part.take(step, result, rows)
        slots = step.slots[rows]
        counts = table.num_generated[slots]
        tokens, stopped = self._store(slots, counts, result.tokens[rows])
        if step.chunks:
            self.state_changes.extend((each, "answering") for each in table.ids[slots[counts == 0]].tolist())
        needs_host_work = table.needs_host_work[slots]
        if needs_host_work.any():
            stopped = stopped | table.stopped_on_host(slots, tokens, needs_host_work)
        ended = stopped | (table.prompt_len[slots] + table.num_generated[slots] > table.limit[slots])
        for slot, by_stop in zip(slots[ended], stopped[ended], strict=True):
            self._finish(int(slot), "stop" if by_stop else "length")
        for part in active:
            part.stored(StoredRows(step, result, slots, tokens, ended))

        streamed = table.streaming[slots] & ~ended
        if not (self._running.pending_release or streamed.any()):
            return _NO_RESPONSES
        plain = streamed & ~needs_host_work & (table.num_sent[slots] == table.num_generated[slots] - 1)
        table.num_sent[slots[plain]] += 1
        others = (self._make_response(int(slot)) for slot in slots[streamed & ~plain])
        responses = Responses(others, table.ids[slots[plain]], tokens[plain])
        responses.extend(self._release())
        return responses

    def _store(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append tokens to those of their slots, which have `counts`; returns the last of each, and what the device has stopped."""
        table = self._running.slots
        if tokens.ndim > 1:
            return table.append_several(slots, counts, tokens)
        stopped, tokens = tokens < 0, np.maximum(tokens, -1 - tokens)
        if counts.max(initial=0) >= table.tokens.shape[1]:
            table.grow_tokens(int(counts.max()) + 1)
        table.tokens[slots, counts], table.num_generated[slots] = tokens, counts + 1
        return tokens, stopped

    def _end_invalid(self, slots: np.ndarray) -> None:
        """End requests whose logits are not finite with an error."""
        running = self._running
        for leader in dict.fromkeys(running.leader_of(slot) for slot in slots.tolist()):
            self.num_invalid += 1
            if self.num_invalid & (self.num_invalid - 1) == 0:  # 1, 2, 4, ...: a broken model ends all requests
                _log.warning(
                    "Request %d ended with an error: %s (%d such requests so far)",
                    running.slots.state_of(leader).request.id, INVALID_LOGITS, self.num_invalid,
                )  # fmt: skip
            running.slots.state_of(leader).error = INVALID_LOGITS
            self._finish(leader, "error")
        if not self.is_loading:
            self.kv.reset()  # cached blocks may hold the cause

    def _finish(self, slot: int, reason: FinishReason) -> None:
        self._running.slots.state_of(slot).reason = reason
        self._running.slots.done[list(self._running.slots_of(slot))] = True
        self._running.stop(slot)

    def _make_response(self, slot: int) -> Response:
        """The tokens of a slot that were not sent yet, and what parts answer."""
        state = self._running.slots.state_of(slot)
        return state.response({"token_ids": self._running.slots.unsent(slot)} | self.parts.answer(state, slot))

    def _final_response(self, state: RequestState) -> Response:
        """The final response to a request that is not running."""
        return state.response({"token_ids": state.generated[state.num_sent :]} | self.parts.answer(state))

    def _release(self) -> list[Response]:
        """Release the slots that no step in flight contains: finished requests get their final response, paused ones wait."""
        responses, running, table = [], self._running, self._running.slots
        for slot in [slot for slot in running.pending_release if not running.in_flight(slot)]:
            running.pending_release.remove(slot)
            state = table.state_of(slot)
            if table.group[slot] < 0 and not state.error:
                running.cache_answer(self.kv, slot)
            if state.reason is not None:
                responses.append(self._make_response(slot))
            else:
                table.pause(slot)
                self._waiting.add(state)
            self.parts.release(slot)
            running.release(self.kv, slot)
        return responses

    def check(self) -> None:
        """Raise AssertionError unless slots, requests and blocks agree, as they do between two steps."""
        self._running.check(self.kv)
