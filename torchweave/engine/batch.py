"""The requests in flight: forms steps and takes in their results. No thread, no device, no clock.

Facts about running requests are arrays over slots, so that a step costs the same few array operations whatever the number of
requests. Python runs per request only when one joins, leaves, is paused, streams, or asked for log-probabilities.

Steps are formed ahead of their results: a step's tokens are unknown when the next is formed, but lengths and positions are
not. A request that the device ends early (a stop token) is thus named by up to `run_ahead - 1` steps more; its slot and blocks
are given back, and its final response sent, when the last of them has completed. A paused request leaves in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from torchweave.engine.active import Active, Queue
from torchweave.engine.forming import Former
from torchweave.engine.kv_cache import KVCache
from torchweave.engine.limits import Limits
from torchweave.engine.planner import Planner
from torchweave.engine.request import FinishReason, InferenceRequest, Output, TokenLogprobs
from torchweave.engine.responses import Response, Responses, refusal
from torchweave.engine.running import Running
from torchweave.engine.scheduler import Decision, Policy, static_batch
from torchweave.engine.slots import Slots
from torchweave.engine.step import Step, StepLogprobs, StepResult
from torchweave.ops.state import MAX_STOP_IDS, SlotUpdates


class Batch:
    """Forms steps from requests and requests' answers from steps.

    Args:
        limits: sizes, and how the tokens of a step are divided.
        kv: owner of the KV cache's blocks.
        policy: decides which waiting requests start, which running ones are paused, and how much of each prompt is read.
        updates: collects what the device has to be told before the next step.
        eos_token_ids: the model's own end tokens.
        reuse: sequences that begin alike share KV cache blocks.

    Attributes:
        paused_total: how often a running request was paused.
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
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.paused_total = 0
        self.static = policy is static_batch
        self._eos = tuple(eos_token_ids)
        self._slots = Slots(limits.max_batch_size)
        self._running = Running(self._slots, kv, reuse)
        self._planner = Planner(limits, policy, self._running)
        self._former = Former(limits, self._running, updates)
        self._waiting = Queue()
        self._arrivals = 0

    # -- requests in -------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that were taken in and not yet finally answered."""
        return len(self._slots.of) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Requests that ran, were paused, and wait to run again."""
        return sum(not self._slots.done[slot] for slot in self._running.leaving) + self._waiting.num_paused

    @property
    def is_landing(self) -> bool:
        """Whether a request waits for what it begins with, on its way from host memory."""
        return self.kv.host is not None and self.kv.host.waiting

    def knows(self, request_id: int) -> bool:
        return request_id in self._slots.of or request_id in self._waiting

    def why_not(self, request: InferenceRequest) -> str:
        """Why a request can never run, in one sentence; empty when it can. Of any thread."""
        return self.limits.why_not(request, self.kv)

    def add(self, request: InferenceRequest, seed: int) -> None:
        """Take in a request for which `why_not` found nothing; `seed` is used when it brings none."""
        params = request.sampling
        stops = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos))))
        active = Active(
            request=request,
            seed=seed if params.seed is None else params.seed,
            arrival=self._arrivals,
            prompt=np.ascontiguousarray(request.input_ids, np.int32),
            stops=stops,
            late_stops=frozenset(stops[MAX_STOP_IDS:]),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
        )
        self._arrivals += 1
        self._waiting.add(active)

    # -- steps out ---------------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """The next step, or None when there is nothing to run, or nothing before a step in flight has completed."""
        running = self._running
        if self._former.spare and not self._waiting and not running.context:
            return self._former.form(running.generating, []) if running.generating.size else None
        while True:
            decision = self._planner.decide(self._waiting)
            generating, chunks = running.generating, []
            if decision is not None:
                chunks = [(slot, size) for slot, size in zip(running.context, decision.chunks, strict=True) if size]
                if decision.resting or decision.paused:
                    generating = self._thin_out(decision)
                chunks += [(self._start(self._waiting.pop()), size) for size in decision.admitted]
                chunks = [chunk for chunk in chunks if self.kv.ready(chunk[0])]
            if chunks or generating.size:
                return self._former.form(generating, chunks)
            if not (decision and decision.paused) or any(running.in_flight(slot) for slot in running.leaving):
                return None
            said = self._release()  # nothing holds the paused ones back: their blocks are for those who waited for them
            assert not said, "whoever is done was let go when its last step was taken in"

    def _start(self, active: Active) -> int:
        return self._former.start(active, self._planner.known(active))

    def _thin_out(self, decision: Decision) -> np.ndarray:
        """Let the paused requests leave; returns the slots that generate in this step."""
        generating, context = self._running.generating, list(self._running.context)
        runs = np.ones(len(generating), bool)
        for index in decision.paused:
            slot = int(generating[index]) if index < len(generating) else context[index - len(generating)]
            self._running.stop(slot)
        self.paused_total += len(decision.paused)
        runs[[*decision.resting, *(index for index in decision.paused if index < len(generating))]] = False
        return generating[runs]

    # -- results in --------------------------------------------------------------------------------------------------

    def absorb(self, step: Step, result: StepResult) -> Responses:
        """Take in what a step produced; returns what there is to say."""
        self._running.completed = step.index
        facts = self._slots
        rows = np.flatnonzero(step.emits & ~facts.done[step.slots])
        slots = step.slots[rows]
        tokens = result.tokens[rows]
        stopped = tokens < 0
        tokens = np.where(stopped, -1 - tokens, tokens)
        counts = facts.count[slots]
        facts.make_room(int(counts.max(initial=0)) + 1)
        facts.tokens[slots, counts] = tokens
        facts.count[slots] = counts + 1

        special = facts.special[slots]
        if special.any():
            stopped = stopped | self._absorb_special(slots, tokens, special, rows, result.logprobs)
        ended = stopped | (facts.prompt_len[slots] + facts.count[slots] > facts.limit[slots])
        for slot, by_stop in zip(slots[ended], stopped[ended], strict=True):
            self._finish(int(slot), "stop" if by_stop else "length")

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
                at = place[int(rows[i])]
                keep = slice(0, active.num_logprobs)
                top = dict(zip(found.top_ids[at][keep].tolist(), found.top_values[at][keep].tolist(), strict=True))
                entry = TokenLogprobs(token, float(found.chosen[at]), int(found.ranks[at]), top)
                active.logprobs = (*active.logprobs, entry)
        return stopped

    def cancel(self, request_id: int) -> list[Response]:
        """Stop a request; the rest of it is said once no step in flight names it."""
        slot = self._slots.of.get(request_id)
        if slot is not None:
            if not self._slots.done[slot]:
                self._finish(slot, "cancelled")
            return self._release()
        active = self._waiting.remove(request_id)
        if active is None:
            return []
        left = Output(active.generated[active.sent :], "cancelled", active.logprobs)
        return [Response(request_id, left, final=True)]

    def _finish(self, slot: int, reason: FinishReason) -> None:
        self._slots.request_in(slot).reason = reason
        self._slots.done[slot] = True
        self._running.stop(slot)

    def _say(self, slot: int) -> Response:
        """What is new about a slot's request since it was last told."""
        active = self._slots.request_in(slot)
        count = int(self._slots.count[slot])
        new = self._slots.tokens[slot, int(self._slots.sent[slot]) : count].copy()
        self._slots.sent[slot] = count
        logprobs, active.logprobs = active.logprobs, ()
        final = active.reason is not None
        return Response(active.request.id, Output(new, active.reason, logprobs), final)

    def _release(self) -> list[Response]:
        """Give back the slots that no step in flight names. Requests that are done are answered for the last time, paused
        ones wait again."""
        responses, running, facts = [], self._running, self._slots
        for slot in [slot for slot in running.leaving if not running.in_flight(slot)]:
            running.leaving.remove(slot)
            active, count = facts.request_in(slot), int(facts.count[slot])
            # The last token was drawn but not read: its key and value are in no block.
            running.publish(slot, min(int(facts.computed[slot]), len(active.prompt) + max(count - 1, 0)))
            if active.reason is not None:
                responses.append(self._say(slot))
            else:
                active.generated = facts.tokens[slot, :count].copy()
                active.sent = int(facts.sent[slot])
                active.paused = True
                self._waiting.add(active)
            running.leave(slot)
        return responses

    def abandon(self, message: str) -> list[Response]:
        """Answer every request with an error and forget it: the device failed, or the engine shuts down."""
        ids = [*self._slots.of, *(active.request.id for active in self._waiting)]
        self._running.clear()
        self.kv.forget_all()  # what the blocks hold is not known when a device has failed
        self._waiting.clear()
        self._former.clear()
        return [refusal(request_id, message) for request_id in ids]
