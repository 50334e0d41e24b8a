"""The requests in flight: forms steps and takes in their results. No thread, no device, no clock.

Facts about running requests are arrays over slots, so that a step costs the same few array operations whatever the number of
requests. Python runs per request only when one joins, leaves, is paused, streams, or asked for log-probabilities.

Steps are formed ahead of their results: a step's tokens are unknown when the next is formed, but lengths and positions are
not. A request that the device ends early (a stop token) is thus named by up to `run_ahead - 1` steps more; its slot and blocks
are given back, and its final response sent, when the last of them has completed. A paused request leaves in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.request import FinishReason, InferenceRequest, Output
from torchweave.engine.responses import Response, Responses, refusal
from torchweave.engine.sampling.beam_search import BeamSearch, num_candidates
from torchweave.engine.sampling.structured_output import GrammarManager
from torchweave.engine.scheduler.beams import BeamGroup, BeamSearches, found
from torchweave.engine.scheduler.invariants import check_running
from torchweave.engine.scheduler.limits import Limits, conflicting_fields
from torchweave.engine.scheduler.planner import PolicyAdapter
from torchweave.engine.scheduler.policies import Decision, Policy, static_batch
from torchweave.engine.scheduler.prompt_logprobs import chunk_size, store_prompt_logprobs
from torchweave.engine.scheduler.request_state import RequestState, WaitingQueue
from torchweave.engine.scheduler.running_set import RunningSet
from torchweave.engine.scheduler.slot_table import SlotTable
from torchweave.engine.scheduler.step import Step, StepLogprobs, StepResult
from torchweave.engine.scheduler.step_builder import StepBuilder
from torchweave.ops.slot_state import MAX_STOP_IDS, SlotUpdates

StateChange = Literal["started", "paused", "answering"]


class Scheduler:
    """Forms steps from requests and requests' answers from steps.

    Args:
        limits: sizes, and how the tokens of a step are divided.
        kv: owner of the KV cache's blocks.
        policy: decides which waiting requests start, which running ones are paused, and how much of each prompt is read.
        updates: collects what the device has to be told before the next step.
        eos_token_ids: the model's own end tokens.
        reuse: sequences that begin alike share KV cache blocks.
        grammars: of answers that have to have a form; None where the model has no tokenizer.

    Attributes:
        paused_total: how often a running request was paused.
        state_changes: (id, `started`, `paused` or `answering`) of requests since they were taken away, in order: began to read a
            prompt (again, after a pause), gave its blocks back, drew its first token.
        static: a batch starts and ends together.
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
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.grammars = grammars
        self.paused_total = 0
        self.state_changes: list[tuple[int, StateChange]] = []
        self.static = policy is static_batch
        self._eos = tuple(eos_token_ids)
        self._slots = SlotTable(limits.max_batch_size)
        self._beams = BeamSearches(self._slots, kv, updates)
        self._running = RunningSet(self._slots, self._beams, kv, reuse)
        self._policy_adapter = PolicyAdapter(limits, policy, self._running)
        self._step_builder = StepBuilder(limits, self._running, updates)
        self._waiting = WaitingQueue()
        self._waiting_for_grammar: dict[
            int, RequestState
        ] = {}  # by id; their grammars are at work, before they start or after a pause
        self._arrivals = 0

    # -- requests in -------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that were taken in and not yet finally answered."""
        return len(self._slots.of) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._waiting_for_grammar)

    @property
    def num_paused(self) -> int:
        """Requests that ran, were paused, and wait to run again."""
        pending_release = sum(not self._slots.done[slot] for slot in self._running.pending_release)
        return (
            pending_release
            + self._waiting.num_paused
            + sum(state.paused for state in self._waiting_for_grammar.values())
        )

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for what it begins with, on its way from host memory."""
        return self.kv.host is not None and self.kv.host.is_loading

    def has_request(self, request_id: int) -> bool:
        return request_id in self._slots.of or request_id in self._waiting or request_id in self._waiting_for_grammar

    def rejection_reason(self, request: InferenceRequest) -> str:
        """Why a request can never run, in one sentence; empty when it can. Of any thread."""
        if request.sampling.structured_outputs is not None and self.grammars is None:
            return "structured_outputs needs a tokenizer, and this model has none."
        return conflicting_fields(request.sampling, self._eos) or self.limits.rejection_reason(request, self.kv)

    def add(self, request: InferenceRequest, seed: int) -> None:
        """Take in a request for which `rejection_reason` found nothing; `seed` is used when it brings none."""
        params = request.sampling
        stops = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos))))
        state = RequestState(
            request=request,
            seed=seed if params.seed is None else params.seed,
            arrival=self._arrivals,
            prompt=np.array(request.input_ids, np.int32),  # a copy: the client may use its array again
            stops=stops,
            host_stop_ids=frozenset(stops[MAX_STOP_IDS:]),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        )
        if params.beam_width > 1:
            most = self.limits.last_position(request) + 1 - len(state.prompt)
            state.search = BeamSearch(params, frozenset(stops), most)
            state.num_logprobs = max(num_candidates(params, len(stops)), state.num_logprobs)
            state.host_stop_ids = frozenset()
        self._arrivals += 1
        if params.structured_outputs is None:
            self._waiting.add(state)
        else:
            assert self.grammars is not None
            state.constraint = self.grammars.constraint(params, stops)
            self._waiting_for_grammar[request.id] = state

    def poll_grammars(self) -> list[Response]:
        """Take note of grammars that are ready; returns what there is to say of requests that end with that."""
        responses, running = [], self._running
        for state in list(self._waiting_for_grammar.values()):
            assert state.constraint is not None
            if not state.constraint.ready:
                continue
            del self._waiting_for_grammar[state.request.id]
            if self._ended_by_grammar(state):
                responses.append(self._final_response(state))
            else:
                self._waiting.add(state)
        for slot, constraint in list(running.logits_processors.constraints.items()):
            skipped = running.logits_processors.skipped[slot] and not self._slots.done[slot]
            if skipped and constraint.ready and not running.in_flight(slot):
                running.logits_processors.skipped[slot] = False
                state = self._slots.state_of(slot)
                if self._ended_by_grammar(state) and state.reason is not None:
                    self._finish(slot, state.reason)
        return responses + self._release() if running.pending_release else responses

    @staticmethod
    def _ended_by_grammar(state: RequestState) -> bool:
        """Whether a request ends by its grammar, in whatever way."""
        assert state.constraint is not None
        state.error = state.constraint.error
        if state.error or state.constraint.complete:
            state.reason = "error" if state.error else "complete"
        return state.reason is not None

    # -- steps out ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to run, or nothing before a step in flight has completed."""
        running = self._running
        if self._step_builder.steps_before_alloc and not self._waiting and not running.prefill and not self._beams:
            decoding = running.logits_processors.runnable(running.decoding)
            return self._step_builder.build(decoding) if decoding.size else None
        while True:
            decision = self._policy_adapter.decide(self._waiting)
            decoding, searches, chunks = running.decoding, self._beams.decoding(), []
            if decision is not None:
                chunks = [(slot, size) for slot, size in zip(running.prefill, decision.chunks, strict=True) if size]
                if decision.skipped or decision.paused:
                    decoding, searches = self._apply_pauses(decision)
                chunks += [(self._start(self._waiting.pop()), size) for size in decision.admitted]
                chunks = [
                    (slot, chunk_size(self._slots.state_of(slot), size)) for slot, size in chunks if self.kv.ready(slot)
                ]
            decoding = running.logits_processors.runnable(decoding)
            searches = [group for group in searches if group.num_rows]
            if chunks or searches or decoding.size:
                return self._step_builder.build(decoding, chunks, searches)
            if not (decision and decision.paused) or any(running.in_flight(slot) for slot in running.pending_release):
                return None
            released = (
                self._release()
            )  # nothing holds the paused ones back: their blocks are for those who waited for them
            assert not released, "whoever is done was let go when its last step was taken in"

    def _start(self, state: RequestState) -> int:
        self.state_changes.append((state.request.id, "started"))
        found, state.match = self._policy_adapter.find_prefix(state), None
        return self._step_builder.start(state, found)

    def _apply_pauses(self, decision: Decision) -> tuple[np.ndarray, list[BeamGroup]]:
        """Let the paused requests leave; returns the slots and the searches that generate in this step."""
        decoding, searches = self._running.decoding, self._beams.decoding()
        slots = [*decoding.tolist(), *(group.leader for group in searches), *self._running.prefill]
        for index in decision.paused:
            self._stop(slots[index])
            self.state_changes.append((self._slots.state_of(slots[index]).request.id, "paused"))
        self.paused_total += len(decision.paused)
        out = {*decision.skipped, *decision.paused}
        runs = np.array([index not in out for index in range(len(decoding) + len(searches))], bool)
        return decoding[runs[: len(decoding)]], [
            group for group, goes in zip(searches, runs[len(decoding) :], strict=True) if goes
        ]

    def _stop(self, slot: int) -> None:
        """Name a request in no step from here on."""
        group = self._beams.of(slot)
        if group is None:
            self._running.stop(slot)
        else:
            self._running.stop_search(group)

    # -- results in --------------------------------------------------------------------------------------------------

    def update(self, step: Step, result: StepResult) -> Responses:
        """Take in what a step produced; returns what there is to say."""
        self._running.completed = step.index
        table = self._slots
        if step.prompt_targets is not None and result.prompt_logprobs is not None:
            store_prompt_logprobs(step.prompt_targets, result.prompt_logprobs, table.state)
        rows = np.flatnonzero(step.emits & ~table.done[step.slots])
        if self._beams:
            rows = self._update_beams(step, rows, result)
        slots = step.slots[rows]
        tokens = result.tokens[rows]
        stopped = tokens < 0
        tokens = np.where(stopped, -1 - tokens, tokens)
        counts = table.num_generated[slots]
        table.grow_tokens(int(counts.max(initial=0)) + 1)
        table.tokens[slots, counts] = tokens
        table.num_generated[slots] = counts + 1

        if step.chunks:
            self.state_changes.extend(
                (request_id, "answering") for request_id in table.ids[slots[counts == 0]].tolist()
            )
        needs_host_work = table.needs_host_work[slots]
        if needs_host_work.any():
            stopped = stopped | self._update_on_host(slots, tokens, needs_host_work, rows, result.logprobs)
        ended = stopped | (table.prompt_len[slots] + table.num_generated[slots] > table.limit[slots])
        for slot, by_stop in zip(slots[ended], stopped[ended], strict=True):
            self._finish(int(slot), "stop" if by_stop else "length")
        if needs_host_work.any() and self._running.logits_processors.constraints:
            self._advance_grammars(slots[needs_host_work & ~ended], tokens[needs_host_work & ~ended])

        streamed = table.streaming[slots] & ~ended
        responses = Responses()
        if streamed.any():
            plain = streamed & ~needs_host_work & (table.num_sent[slots] == counts)
            table.num_sent[slots[plain]] += 1
            responses = Responses(
                (self._make_response(int(slot)) for slot in slots[streamed & ~plain]),
                table.ids[slots[plain]],
                tokens[plain],
            )
        responses.extend(self._release())
        return responses

    def _update_beams(self, step: Step, rows: np.ndarray, result: StepResult) -> np.ndarray:
        """Take in the rows of beam searches; returns the others."""
        searching = self._slots.group[step.slots[rows]] >= 0
        if searching.any():
            assert result.logprobs is not None
            for group in self._beams.update(step.slots[rows[searching]], rows[searching], result.logprobs):
                self._finish(group.leader, group.search.best()[0].finish_reason)
        return rows[~searching]

    def _update_on_host(
        self,
        slots: np.ndarray,
        tokens: np.ndarray,
        needs_host_work: np.ndarray,
        rows: np.ndarray,
        found: StepLogprobs | None,
    ) -> np.ndarray:
        """Log-probabilities, and stop tokens beyond those that the device knows. Returns which rows these stopped."""
        stopped = np.zeros(len(slots), bool)
        entry_of_row = {int(row): i for i, row in enumerate(found.rows)} if found is not None else {}
        for i in np.flatnonzero(needs_host_work):
            state = self._slots.state_of(int(slots[i]))
            token = int(tokens[i])
            generated = int(self._slots.num_generated[slots[i]])
            stopped[i] = token in state.host_stop_ids and generated > state.request.sampling.min_tokens
            if state.num_logprobs >= 0 and found is not None:
                entry = found.entry(entry_of_row[int(rows[i])], token, state.num_logprobs)
                state.logprobs.append(entry)
        return stopped

    def _advance_grammars(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Tell grammars what was drawn."""
        constraints = [self._slots.state_of(int(slot)).constraint for slot in slots]
        drawn = [(each, int(token)) for each, token in zip(constraints, tokens, strict=True) if each is not None]
        if drawn:
            assert self.grammars is not None
            self.grammars.advance(drawn)

    def cancel(self, request_id: int) -> list[Response]:
        """Stop a request; the rest of it is said once no step in flight names it."""
        slot = self._slots.of.get(request_id)
        if slot is not None:
            if not self._slots.done[slot]:
                self._finish(slot, "cancelled")
            return self._release()
        state = self._waiting.remove(request_id) or self._waiting_for_grammar.pop(request_id, None)
        if state is None:
            return []
        state.reason = "cancelled"
        return [self._final_response(state)]

    @staticmethod
    def _final_response(state: RequestState) -> Response:
        """The last response to a request that does not run."""
        if state.search is not None:
            return found(state)
        new, logprobs = state.generated[state.num_sent :], tuple(state.logprobs)
        output = Output(new, state.reason, logprobs, tuple(state.prompt_logprobs))
        return Response(state.request.id, output, final=True, error=state.error)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        group = self._beams.of(slot)
        self._slots.state_of(slot).reason = reason
        self._slots.done[slot if group is None else group.slots] = True
        self._stop(slot)

    def _make_response(self, slot: int) -> Response:
        """What is new about a slot's request since it was last told."""
        state = self._slots.state_of(slot)
        num_generated = int(self._slots.num_generated[slot])
        new = self._slots.tokens[slot, int(self._slots.num_sent[slot]) : num_generated].copy()
        self._slots.num_sent[slot] = num_generated
        logprobs, state.logprobs = tuple(state.logprobs), []
        of_prompt, state.prompt_logprobs = tuple(state.prompt_logprobs), []
        final = state.reason is not None
        return Response(state.request.id, Output(new, state.reason, logprobs, of_prompt), final, state.error)

    def _release(self) -> list[Response]:
        """Give back the slots that no step in flight names. Requests that are done are answered for the last time, paused
        ones wait again."""
        responses, running, table = [], self._running, self._slots
        for slot in [slot for slot in running.pending_release if not running.in_flight(slot)]:
            running.pending_release.remove(slot)
            if (group := self._beams.of(slot)) is not None:
                responses += self._release_search(group)
                continue
            state, num_generated = table.state_of(slot), int(table.num_generated[slot])
            # The last token was drawn but not read: its key and value are in no block.
            running.cache_full_blocks(
                slot, min(int(table.num_computed[slot]), len(state.prompt) + max(num_generated - 1, 0))
            )
            if state.reason is not None:
                responses.append(self._make_response(slot))
            else:
                state.generated = table.tokens[slot, :num_generated].copy()
                state.num_sent = int(table.num_sent[slot])
                state.paused = True
                if state.constraint is None:
                    self._waiting.add(state)
                else:
                    self._waiting_for_grammar[state.request.id] = state
            running.release(slot)
        return responses

    def _release_search(self, group: BeamGroup) -> list[Response]:
        """The same for a beam search."""
        state = group.state
        self._beams.release(group)
        if state.reason is not None:
            return [found(state)]
        state.generated = group.search.beams[0].tokens
        state.paused = True
        self._waiting.add(state)
        return []

    def check(self) -> None:
        """Raise AssertionError where slots, requests and blocks do not agree; between two steps they do."""
        check_running(self._running)

    def abort_all(self, message: str) -> list[Response]:
        """Answer every request with an error and forget it: the device failed, or the engine shuts down."""
        ids = [*self._slots.of, *(state.request.id for state in self._waiting), *self._waiting_for_grammar]
        self._running.clear()
        self.kv.reset()  # what the blocks hold is not known when a device has failed
        self._waiting.clear()
        self._waiting_for_grammar.clear()
        self._step_builder.clear()
        return [refusal(request_id, message) for request_id in ids]
