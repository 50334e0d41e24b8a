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

from torchweave.engine.kv_cache.block_manager import KVCache
from torchweave.engine.request import FinishReason, InferenceRequest, Output
from torchweave.engine.responses import Response, Responses, refusal
from torchweave.engine.sampling.beam_search import BeamSearch, num_candidates
from torchweave.engine.sampling.prompt_logprobs import chunk_size, take_in
from torchweave.engine.sampling.structured_output import Grammars
from torchweave.engine.scheduler.beams import Beams, Group, found
from torchweave.engine.scheduler.invariants import check_running
from torchweave.engine.scheduler.limits import Limits, why_not_together
from torchweave.engine.scheduler.planner import Planner
from torchweave.engine.scheduler.policies import Decision, Policy, static_batch
from torchweave.engine.scheduler.request_state import Active, Queue
from torchweave.engine.scheduler.running_set import Running
from torchweave.engine.scheduler.slot_table import Slots
from torchweave.engine.scheduler.step import Step, StepLogprobs, StepResult
from torchweave.engine.scheduler.step_builder import Former
from torchweave.ops.slot_state import MAX_STOP_IDS, SlotUpdates

Move = Literal["started", "paused", "answering"]


class Batch:
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
        moves: (id, `started`, `paused` or `answering`) of requests since they were taken away, in order: began to read a
            prompt (again, after a pause), gave its blocks back, drew its first token.
        static: a batch starts and ends together.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        policy: Policy,
        updates: SlotUpdates,
        eos_token_ids: Iterable[int] = (),
        reuse: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.grammars = grammars
        self.paused_total = 0
        self.moves: list[tuple[int, Move]] = []
        self.static = policy is static_batch
        self._eos = tuple(eos_token_ids)
        self._slots = Slots(limits.max_batch_size)
        self._beams = Beams(self._slots, kv, updates)
        self._running = Running(self._slots, self._beams, kv, reuse)
        self._planner = Planner(limits, policy, self._running)
        self._former = Former(limits, self._running, updates)
        self._waiting = Queue()
        self._preparing: dict[int, Active] = {}  # by id; their grammars are at work, before they start or after a pause
        self._arrivals = 0

    # -- requests in -------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that were taken in and not yet finally answered."""
        return len(self._slots.of) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preparing)

    @property
    def num_paused(self) -> int:
        """Requests that ran, were paused, and wait to run again."""
        leaving = sum(not self._slots.done[slot] for slot in self._running.leaving)
        return leaving + self._waiting.num_paused + sum(active.paused for active in self._preparing.values())

    @property
    def is_landing(self) -> bool:
        """Whether a request waits for what it begins with, on its way from host memory."""
        return self.kv.host is not None and self.kv.host.waiting

    def knows(self, request_id: int) -> bool:
        return request_id in self._slots.of or request_id in self._waiting or request_id in self._preparing

    def why_not(self, request: InferenceRequest) -> str:
        """Why a request can never run, in one sentence; empty when it can. Of any thread."""
        if request.sampling.structured_outputs is not None and self.grammars is None:
            return "structured_outputs needs a tokenizer, and this model has none."
        return why_not_together(request.sampling, self._eos) or self.limits.why_not(request, self.kv)

    def add(self, request: InferenceRequest, seed: int) -> None:
        """Take in a request for which `why_not` found nothing; `seed` is used when it brings none."""
        params = request.sampling
        stops = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos))))
        active = Active(
            request=request,
            seed=seed if params.seed is None else params.seed,
            arrival=self._arrivals,
            prompt=np.array(request.input_ids, np.int32),  # a copy: the client may use its array again
            stops=stops,
            late_stops=frozenset(stops[MAX_STOP_IDS:]),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        )
        if params.beam_width > 1:
            most = self.limits.last_position(request) + 1 - len(active.prompt)
            active.search = BeamSearch(params, frozenset(stops), most)
            active.num_logprobs = max(num_candidates(params, len(stops)), active.num_logprobs)
            active.late_stops = frozenset()
        self._arrivals += 1
        if params.structured_outputs is None:
            self._waiting.add(active)
        else:
            assert self.grammars is not None
            active.constraint = self.grammars.constraint(params, stops)
            self._preparing[request.id] = active

    def attend(self) -> list[Response]:
        """Take note of grammars that are ready; returns what there is to say of requests that end with that."""
        responses, running = [], self._running
        for active in list(self._preparing.values()):
            assert active.constraint is not None
            if not active.constraint.ready:
                continue
            del self._preparing[active.request.id]
            if self._ends(active):
                responses.append(self._left(active))
            else:
                self._waiting.add(active)
        for slot, constraint in list(running.adjustments.constraints.items()):
            resting = running.adjustments.resting[slot] and not self._slots.done[slot]
            if resting and constraint.ready and not running.in_flight(slot):
                running.adjustments.resting[slot] = False
                active = self._slots.request_in(slot)
                if self._ends(active) and active.reason is not None:
                    self._finish(slot, active.reason)
        return responses + self._release() if running.leaving else responses

    @staticmethod
    def _ends(active: Active) -> bool:
        """Whether a request ends by its grammar, in whatever way."""
        assert active.constraint is not None
        active.error = active.constraint.error
        if active.error or active.constraint.complete:
            active.reason = "error" if active.error else "complete"
        return active.reason is not None

    # -- steps out ---------------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """The next step, or None when there is nothing to run, or nothing before a step in flight has completed."""
        running = self._running
        if self._former.spare and not self._waiting and not running.context and not self._beams:
            generating = running.adjustments.awake(running.generating)
            return self._former.form(generating) if generating.size else None
        while True:
            decision = self._planner.decide(self._waiting)
            generating, searches, chunks = running.generating, self._beams.generating(), []
            if decision is not None:
                chunks = [(slot, size) for slot, size in zip(running.context, decision.chunks, strict=True) if size]
                if decision.resting or decision.paused:
                    generating, searches = self._thin_out(decision)
                chunks += [(self._start(self._waiting.pop()), size) for size in decision.admitted]
                chunks = [
                    (slot, chunk_size(self._slots.request_in(slot), size))
                    for slot, size in chunks
                    if self.kv.ready(slot)
                ]
            generating = running.adjustments.awake(generating)
            searches = [group for group in searches if group.num_rows]
            if chunks or searches or generating.size:
                return self._former.form(generating, chunks, searches)
            if not (decision and decision.paused) or any(running.in_flight(slot) for slot in running.leaving):
                return None
            said = self._release()  # nothing holds the paused ones back: their blocks are for those who waited for them
            assert not said, "whoever is done was let go when its last step was taken in"

    def _start(self, active: Active) -> int:
        self.moves.append((active.request.id, "started"))
        found, active.match = self._planner.known(active), None
        return self._former.start(active, found)

    def _thin_out(self, decision: Decision) -> tuple[np.ndarray, list[Group]]:
        """Let the paused requests leave; returns the slots and the searches that generate in this step."""
        generating, searches = self._running.generating, self._beams.generating()
        slots = [*generating.tolist(), *(group.leader for group in searches), *self._running.context]
        for index in decision.paused:
            self._stop(slots[index])
            self.moves.append((self._slots.request_in(slots[index]).request.id, "paused"))
        self.paused_total += len(decision.paused)
        out = {*decision.resting, *decision.paused}
        runs = np.array([index not in out for index in range(len(generating) + len(searches))], bool)
        return generating[runs[: len(generating)]], [
            group for group, goes in zip(searches, runs[len(generating) :], strict=True) if goes
        ]

    def _stop(self, slot: int) -> None:
        """Name a request in no step from here on."""
        group = self._beams.of(slot)
        if group is None:
            self._running.stop(slot)
        else:
            self._running.stop_search(group)

    # -- results in --------------------------------------------------------------------------------------------------

    def absorb(self, step: Step, result: StepResult) -> Responses:
        """Take in what a step produced; returns what there is to say."""
        self._running.completed = step.index
        facts = self._slots
        if step.scored is not None and result.scores is not None:
            take_in(step.scored, result.scores, facts.active)
        rows = np.flatnonzero(step.emits & ~facts.done[step.slots])
        if self._beams:
            rows = self._hear(step, rows, result)
        slots = step.slots[rows]
        tokens = result.tokens[rows]
        stopped = tokens < 0
        tokens = np.where(stopped, -1 - tokens, tokens)
        counts = facts.count[slots]
        facts.make_room(int(counts.max(initial=0)) + 1)
        facts.tokens[slots, counts] = tokens
        facts.count[slots] = counts + 1

        if step.chunks:
            self.moves.extend((request_id, "answering") for request_id in facts.ids[slots[counts == 0]].tolist())
        special = facts.special[slots]
        if special.any():
            stopped = stopped | self._absorb_special(slots, tokens, special, rows, result.logprobs)
        ended = stopped | (facts.prompt_len[slots] + facts.count[slots] > facts.limit[slots])
        for slot, by_stop in zip(slots[ended], stopped[ended], strict=True):
            self._finish(int(slot), "stop" if by_stop else "length")
        if special.any() and self._running.adjustments.constraints:
            self._go_on(slots[special & ~ended], tokens[special & ~ended])

        told = facts.streaming[slots] & ~ended
        responses = Responses()
        if told.any():
            plain = told & ~special & (facts.sent[slots] == counts)
            facts.sent[slots[plain]] += 1
            responses = Responses(
                (self._say(int(slot)) for slot in slots[told & ~plain]), facts.ids[slots[plain]], tokens[plain]
            )
        responses.extend(self._release())
        return responses

    def _hear(self, step: Step, rows: np.ndarray, result: StepResult) -> np.ndarray:
        """Take in the rows of beam searches; returns the others."""
        searching = self._slots.group[step.slots[rows]] >= 0
        if searching.any():
            assert result.logprobs is not None
            for group in self._beams.hear(step.slots[rows[searching]], rows[searching], result.logprobs):
                self._finish(group.leader, group.search.best()[0].finish_reason)
        return rows[~searching]

    def _absorb_special(
        self, slots: np.ndarray, tokens: np.ndarray, special: np.ndarray, rows: np.ndarray, found: StepLogprobs | None
    ) -> np.ndarray:
        """Log-probabilities, and stop tokens beyond those that the device knows. Returns which rows these stopped."""
        stopped = np.zeros(len(slots), bool)
        place = {int(row): i for i, row in enumerate(found.rows)} if found is not None else {}
        for i in np.flatnonzero(special):
            active = self._slots.request_in(int(slots[i]))
            token = int(tokens[i])
            generated = int(self._slots.count[slots[i]])
            stopped[i] = token in active.late_stops and generated > active.request.sampling.min_tokens
            if active.num_logprobs >= 0 and found is not None:
                entry = found.entry(place[int(rows[i])], token, active.num_logprobs)
                active.logprobs.append(entry)
        return stopped

    def _go_on(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Tell grammars what was drawn."""
        constraints = [self._slots.request_in(int(slot)).constraint for slot in slots]
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
        active = self._waiting.remove(request_id) or self._preparing.pop(request_id, None)
        if active is None:
            return []
        active.reason = "cancelled"
        return [self._left(active)]

    @staticmethod
    def _left(active: Active) -> Response:
        """The last response to a request that does not run."""
        if active.search is not None:
            return found(active)
        new, logprobs = active.generated[active.sent :], tuple(active.logprobs)
        left = Output(new, active.reason, logprobs, tuple(active.prompt_logprobs))
        return Response(active.request.id, left, final=True, error=active.error)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        group = self._beams.of(slot)
        self._slots.request_in(slot).reason = reason
        self._slots.done[slot if group is None else group.slots] = True
        self._stop(slot)

    def _say(self, slot: int) -> Response:
        """What is new about a slot's request since it was last told."""
        active = self._slots.request_in(slot)
        count = int(self._slots.count[slot])
        new = self._slots.tokens[slot, int(self._slots.sent[slot]) : count].copy()
        self._slots.sent[slot] = count
        logprobs, active.logprobs = tuple(active.logprobs), []
        of_prompt, active.prompt_logprobs = tuple(active.prompt_logprobs), []
        final = active.reason is not None
        return Response(active.request.id, Output(new, active.reason, logprobs, of_prompt), final, active.error)

    def _release(self) -> list[Response]:
        """Give back the slots that no step in flight names. Requests that are done are answered for the last time, paused
        ones wait again."""
        responses, running, facts = [], self._running, self._slots
        for slot in [slot for slot in running.leaving if not running.in_flight(slot)]:
            running.leaving.remove(slot)
            if (group := self._beams.of(slot)) is not None:
                responses += self._release_search(group)
                continue
            active, count = facts.request_in(slot), int(facts.count[slot])
            # The last token was drawn but not read: its key and value are in no block.
            running.publish(slot, min(int(facts.computed[slot]), len(active.prompt) + max(count - 1, 0)))
            if active.reason is not None:
                responses.append(self._say(slot))
            else:
                active.generated = facts.tokens[slot, :count].copy()
                active.sent = int(facts.sent[slot])
                active.paused = True
                if active.constraint is None:
                    self._waiting.add(active)
                else:
                    self._preparing[active.request.id] = active
            running.leave(slot)
        return responses

    def _release_search(self, group: Group) -> list[Response]:
        """The same for a beam search."""
        active = group.active
        self._beams.leave(group)
        if active.reason is not None:
            return [found(active)]
        active.generated = group.search.beams[0].tokens
        active.paused = True
        self._waiting.add(active)
        return []

    def check(self) -> None:
        """Raise AssertionError where slots, requests and blocks do not agree; between two steps they do."""
        check_running(self._running)

    def abandon(self, message: str) -> list[Response]:
        """Answer every request with an error and forget it: the device failed, or the engine shuts down."""
        ids = [*self._slots.of, *(active.request.id for active in self._waiting), *self._preparing]
        self._running.clear()
        self.kv.forget_all()  # what the blocks hold is not known when a device has failed
        self._waiting.clear()
        self._preparing.clear()
        self._former.clear()
        return [refusal(request_id, message) for request_id in ids]
