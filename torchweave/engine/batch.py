"""The requests in flight: forms steps and takes in their results. No thread, no device, no clock.

Facts about running requests are arrays over slots, so that a step costs the same few array operations whatever the number of
requests. Python runs per request only when one joins, leaves, is paused, streams, or asked for log-probabilities.

Steps are formed ahead of their results: a step's tokens are unknown when the next is formed, but lengths and positions are
not. A request that the device ends early (a stop token) is thus named by up to `run_ahead - 1` steps more; its slot and blocks
are given back, and its final response sent, when the last of them has completed. A paused request leaves in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torchweave.engine.active import Active, Queue
from torchweave.engine.kv_cache import KVCache
from torchweave.engine.limits import Limits
from torchweave.engine.planner import Planner
from torchweave.engine.request import FinishReason, InferenceRequest, Output, TokenLogprobs
from torchweave.engine.scheduler import Decision, Policy, static_batch
from torchweave.engine.slots import Slots
from torchweave.engine.step import Chunk, Step, StepLogprobs, StepResult
from torchweave.ops.state import MAX_STOP_IDS, SlotUpdates

GRANT_AHEAD = 16  # tokens: a sequence gets its next block this early, together with others that need one soon
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Response:
    """What the batch manager says to the client about one request."""

    id: int
    output: Output
    final: bool
    error: str = ""


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
        self._updates = updates
        self._eos = tuple(eos_token_ids)
        self._reuse = reuse
        self._slots = Slots(limits.max_batch_size)
        self._planner = Planner(limits, policy, kv, self._slots, reuse)
        self._waiting = Queue()
        self._arrivals = 0
        self._context: list[int] = []  # slots whose prompt is still being read, oldest first
        self._generating = np.empty(0, np.int32)  # slots that take one token a step
        self._on_device = self._generating  # the generating slots as the device knows them
        self._leaving: list[int] = []  # slots that are done or paused but still named by a step in flight
        self._spare = 0  # so many steps without context need no block for anyone
        self._next_index = 0
        self._completed = -1  # index of the last step whose result was taken in

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
        return sum(not self._slots.done[slot] for slot in self._leaving) + sum(each.paused for each in self._waiting)

    def room(self) -> int:
        """Requests that can be taken in before the waiting ones could no longer all start at once."""
        return max(len(self._slots.free) - len(self._waiting), 0)

    def knows(self, request_id: int) -> bool:
        return request_id in self._slots.of or any(active.request.id == request_id for active in self._waiting)

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
        if self._spare and not self._waiting and not self._context:
            return self._form(self._generating, []) if self._generating.size else None
        while True:
            decision = self._planner.decide(self._generating, self._context, self._waiting, self._leaving)
            generating, chunks = self._generating, []
            if decision is not None:
                chunks = [(slot, size) for slot, size in zip(self._context, decision.chunks, strict=True) if size]
                if decision.resting or decision.paused:
                    generating = self._thin_out(decision)
                chunks += [(self._start(self._waiting.pop()), size) for size in decision.admitted]
            if chunks or generating.size:
                return self._form(generating, chunks)
            if not (decision and decision.paused) or any(self._in_flight(slot) for slot in self._leaving):
                return None
            said = self._release()  # nothing holds the paused ones back: their blocks are for those who waited for them
            assert not said, "whoever is done was let go when its last step was taken in"

    def _in_flight(self, slot: int) -> bool:
        return self._slots.last_named[slot] > self._completed

    def _thin_out(self, decision: Decision) -> np.ndarray:
        """Let the paused requests leave; returns the slots that generate in this step."""
        generating, context = self._generating, list(self._context)
        runs = np.ones(len(generating), bool)
        for index in decision.paused:
            slot = int(generating[index]) if index < len(generating) else context[index - len(generating)]
            self._stop_running(slot)
        self.paused_total += len(decision.paused)
        runs[[*decision.resting, *(index for index in decision.paused if index < len(generating))]] = False
        return generating[runs]

    def _start(self, active: Active) -> int:
        """Give a request a slot, and tell the device all it has to know about it."""
        blocks, _ = self._planner.known(active)
        last = self.limits.last_position(active.request)
        slot = self._slots.occupy(active, last, len(blocks) * self.kv.block_size)
        if blocks:
            grant = self.kv.attach(slot, blocks)
            self._updates.set_blocks(grant.slots, grant.columns, grant.blocks)
        self.kv.missed_total += active.context_len // self.kv.block_size - len(blocks)
        self.kv.reserve(slot, self.kv.blocks_for(last))
        self._context.append(slot)
        updates, params = self._updates, active.request.sampling
        updates.set("position", slot, active.context_len - 1)
        updates.set("min_position", slot, len(active.prompt) + params.min_tokens)
        updates.set("temperature", slot, params.temperature)
        updates.set("top_k", slot, max(params.top_k, 0))
        updates.set("top_p", slot, params.top_p)
        updates.set("min_p", slot, params.min_p)
        updates.set_seed(slot, active.seed)
        updates.set_stop_ids(slot, active.stops)
        return slot

    def _form(self, generating: np.ndarray, chunks: list[tuple[int, int]]) -> Step:
        computed = self._slots.computed
        starts = computed[generating]
        slots, sizes, reads = generating, np.int64(1), ()
        if chunks:
            slots = np.concatenate([generating, np.array([slot for slot, _ in chunks], np.int32)])
            sizes = np.concatenate([np.ones(len(generating), np.int64), [size for _, size in chunks]])
            reads = tuple(self._chunk(slot, size) for slot, size in chunks)
        after = computed[slots] + sizes
        if self._spare and not chunks:
            self._spare -= 1
        else:
            self._grant(slots, after)
            everyone = not chunks and len(generating) == len(self._generating)
            self._spare = int((self.kv.held[slots] * self.kv.block_size - after).min()) if everyone else 0
        computed[slots] = after
        emits = np.ones(len(slots), bool)
        for row, (slot, _) in enumerate(chunks, start=len(generating)):
            emits[row] = self._slots.context_left(slot) == 0
            self._publish(slot, int(computed[slot]))

        step = Step(
            index=self._next_index,
            slots=slots,
            starts=starts,
            chunks=reads,
            emits=emits,
            updates=self._take_updates(None if chunks else generating),
            max_seq_len=int(after.max()),
            logprobs=self._logprob_rows(slots, emits),
        )
        self._slots.last_named[slots] = step.index
        self._next_index += 1
        self._advance(slots, after, emits, len(generating))
        return step

    def _chunk(self, slot: int, size: int) -> Chunk:
        start = int(self._slots.computed[slot])
        return Chunk(start, self._slots.request_in(slot).context[start : start + size])

    def _grant(self, slots: np.ndarray, after: np.ndarray) -> None:
        """Give the blocks that a step needs, and some tokens more where there is enough."""
        if not self.kv.lacking(slots, after).any():
            return
        wanted = np.maximum(np.minimum(after + GRANT_AHEAD, self._slots.limit[slots]), after)
        if self.kv.lacking(slots, wanted).sum() > self.kv.num_free:
            wanted = after
        grant = self.kv.grant(slots, wanted)
        self._updates.set_blocks(grant.slots, grant.columns, grant.blocks)

    def _publish(self, slot: int, num_tokens: int) -> None:
        """Let others use the full blocks among the first `num_tokens` tokens of a slot, which launched steps have read."""
        if self._reuse:
            tokens = self._slots.sequence(slot, num_tokens)
            hashes = self._slots.request_in(slot).hashes(tokens, self.kv.block_size)
            self.kv.publish(slot, hashes, first=int(self.kv.shared[slot]))

    def _take_updates(self, generating: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """Pending changes; the list of generating slots is brought up to date when the step reads it (decode only)."""
        if generating is not None and not np.array_equal(generating, self._on_device):
            self._updates.set_batch(generating)
            self._on_device = generating
        return self._updates.take() if len(self._updates) else None

    def _advance(self, slots: np.ndarray, after: np.ndarray, emits: np.ndarray, num_generating: int) -> None:
        """Which slots generate from here on: those that emitted and have not read all they may, and those that rested."""
        more = after < self._slots.limit[slots]
        had_context = len(slots) > num_generating
        rested = self._generating[:0]
        if num_generating < len(self._generating):
            rested = self._generating[~np.isin(self._generating, slots[:num_generating])]
        if had_context:
            self._context = [slot for slot in self._context if self._slots.context_left(slot) > 0]
        if had_context or rested.size or not more.all():
            self._generating = np.concatenate([slots[emits & more], rested])

    def _logprob_rows(self, slots: np.ndarray, emits: np.ndarray) -> tuple[np.ndarray, int] | None:
        rows = np.flatnonzero(self._slots.special[slots] & emits)
        counts = [self._slots.request_in(int(slots[row])).num_logprobs for row in rows]
        wanted = [(row, count) for row, count in zip(rows, counts, strict=True) if count >= 0]
        if not wanted:
            return None
        return np.array([row for row, _ in wanted]), max(count for _, count in wanted)

    # -- results in --------------------------------------------------------------------------------------------------

    def absorb(self, step: Step, result: StepResult) -> list[Response]:
        """Take in what a step produced; returns what there is to say, in the order of the rows."""
        self._completed = step.index
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

        responses = [self._say(int(slot)) for slot in slots[facts.streaming[slots] & ~ended]]
        return responses + self._release()

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
        self._stop_running(slot)

    def _stop_running(self, slot: int) -> None:
        """Name a slot in no step from here on; it is left when those that name it have completed."""
        if slot not in self._leaving:
            self._leaving.append(slot)
        if slot in self._context:
            self._context.remove(slot)
        self._generating = self._generating[self._generating != slot]

    def _say(self, slot: int) -> Response:
        """What is new about a slot's request since it was last told."""
        active = self._slots.request_in(slot)
        count = int(self._slots.count[slot])
        new = self._slots.tokens[slot, active.sent : count].copy()
        active.sent = count
        logprobs, active.logprobs = active.logprobs, ()
        final = active.reason is not None
        return Response(active.request.id, Output(new, active.reason, logprobs), final)

    def _release(self) -> list[Response]:
        """Give back the slots that no step in flight names. Requests that are done are answered for the last time, paused
        ones wait again."""
        responses = []
        for slot in [slot for slot in self._leaving if not self._in_flight(slot)]:
            self._leaving.remove(slot)
            active, count = self._slots.request_in(slot), int(self._slots.count[slot])
            # The last token was drawn but not read: its key and value are in no block.
            self._publish(slot, min(int(self._slots.computed[slot]), len(active.prompt) + max(count - 1, 0)))
            if active.reason is not None:
                responses.append(self._say(slot))
            else:
                active.generated = self._slots.tokens[slot, :count].copy()
                active.paused = True
                self._waiting.add(active)
            self._slots.vacate(slot)
            self.kv.free(slot)
        return responses

    def abandon(self, message: str) -> list[Response]:
        """Answer every request with an error and forget it: the device failed, or the engine shuts down."""
        ids = [*self._slots.of, *(active.request.id for active in self._waiting)]
        for slot in list(self._slots.of.values()):
            self.kv.free(slot)
            self._slots.vacate(slot)
        self.kv.forget_all()  # what the blocks hold is not known when a device has failed
        self._waiting.clear()
        self._context.clear()
        self._leaving.clear()
        self._generating = np.empty(0, np.int32)
        self._spare = 0
        self._updates.take()
        return [Response(request_id, Output(_NO_TOKENS, "error"), final=True, error=message) for request_id in ids]
