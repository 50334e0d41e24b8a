"""The requests in flight: forms steps and takes in their results. No thread, no device, no clock.

Facts about running requests are arrays over slots, so that a step costs the same few array operations whatever the number of
requests. Python runs per request only when one joins, leaves, streams, or asked for log-probabilities.

Steps are formed ahead of their results: a step's tokens are unknown when the next is formed, but lengths and positions are
not. A request that the device ends early (a stop token) is thus named by up to `run_ahead - 1` steps more; its slot and blocks
are given back, and its final response sent, when the last of them has completed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache import KVCache
from torchweave.engine.limits import Limits
from torchweave.engine.request import FinishReason, InferenceRequest, Output, SamplingParams, TokenLogprobs
from torchweave.engine.scheduler import Policy, Snapshot, Waiting
from torchweave.engine.step import Chunk, Step, StepLogprobs, StepResult
from torchweave.ops.state import MAX_STOP_IDS, SlotUpdates

GRANT_AHEAD = 16  # tokens: a sequence gets its next block this early, together with others that need one soon


@dataclass(frozen=True)
class Response:
    """What the batch manager says to the client about one request."""

    id: int
    output: Output
    final: bool
    error: str = ""


@dataclass
class _Running:
    request: InferenceRequest
    prompt: np.ndarray
    late_stops: frozenset[int]  # stop tokens beyond what the device holds
    num_logprobs: int
    sent: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None


class Batch:
    """Forms steps from requests and requests' answers from steps.

    Args:
        limits: sizes.
        kv: owner of the KV cache's blocks.
        policy: decides which waiting requests start and how much of each prompt is read.
        updates: collects what the device has to be told before the next step.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self, limits: Limits, kv: KVCache, policy: Policy, updates: SlotUpdates, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.limits = limits
        self.kv = kv
        self._policy = policy
        self._updates = updates
        self._eos = tuple(eos_token_ids)
        size = limits.max_batch_size
        self._running: list[_Running | None] = [None] * size
        self._slot_of: dict[int, int] = {}
        self._waiting: deque[tuple[InferenceRequest, int]] = deque()  # with the seed of its random numbers
        self._free_slots = list(range(size - 1, -1, -1))
        self._context: list[int] = []  # slots whose prompt is still being read, oldest first
        self._generating = np.empty(0, np.int32)  # slots that take one token a step, oldest first
        self._on_device = self._generating  # the generating slots as the device knows them
        self._leaving: list[int] = []  # slots that are done but still named by a step in flight

        self._prompt_len = np.zeros(size, np.int64)
        self._computed = np.zeros(size, np.int64)  # tokens that launched steps have read
        self._limit = np.zeros(size, np.int64)  # tokens to read until the last one is generated
        self._count = np.zeros(size, np.int64)  # tokens generated and read back
        self._done = np.ones(size, bool)
        self._streaming = np.zeros(size, bool)
        self._special = np.zeros(size, bool)  # needs Python with every token: log-probabilities, many stop tokens
        self._last_named = np.full(size, -1, np.int64)
        self._tokens = np.zeros((size, 256), np.int32)
        self._next_index = 0

    # -- requests in -------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests that were taken in and not yet finally answered."""
        return len(self._slot_of) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def room(self) -> int:
        """Requests that can be taken in before the waiting ones could no longer all start at once."""
        return max(len(self._free_slots) - len(self._waiting), 0)

    def knows(self, request_id: int) -> bool:
        return request_id in self._slot_of or any(request.id == request_id for request, _ in self._waiting)

    def why_not(self, request: InferenceRequest) -> str:
        """Why a request can never run, in one sentence; empty when it can. Of any thread."""
        return self.limits.why_not(request, self.kv)

    def add(self, request: InferenceRequest, seed: int) -> None:
        """Take in a request for which `why_not` found nothing; `seed` is used when it brings none."""
        self._waiting.append((request, seed if request.sampling.seed is None else request.sampling.seed))

    # -- steps out ---------------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """The next step, or None when there is nothing to run."""
        chunks: list[tuple[int, int]] = []
        if self._waiting or self._context:
            chunks = self._plan_context()
        if not chunks and not self._generating.size:
            return None
        return self._form(chunks)

    def _plan_context(self) -> list[tuple[int, int]]:
        waiting = tuple(
            Waiting(len(request.input_ids), self.kv.blocks_for(self.limits.last_position(request)))
            for request, _ in list(self._waiting)[: len(self._free_slots)]
        )
        decision = self._policy(
            Snapshot(
                max_num_tokens=self.limits.max_num_tokens,
                free_slots=len(self._free_slots),
                unreserved_blocks=self.kv.num_unreserved,
                num_generation=len(self._generating),
                context=tuple(self._prompt_left(slot) for slot in self._context),
                waiting=waiting,
                chunked_context=self.limits.chunked_context,
            )
        )
        chunks = [(slot, size) for slot, size in zip(self._context, decision.chunks, strict=True) if size]
        chunks += [(self._start(*self._waiting.popleft()), size) for size in decision.admitted]
        return chunks

    def _prompt_left(self, slot: int) -> int:
        return int(self._prompt_len[slot] - self._computed[slot])

    def _start(self, request: InferenceRequest, seed: int) -> int:
        """Give a request a slot, and tell the device all it has to know about it."""
        slot = self._free_slots.pop()
        params = request.sampling
        prompt = np.ascontiguousarray(request.input_ids, np.int32)
        stops = tuple(params.stop_token_ids or ()) + (() if params.ignore_eos else self._eos)
        stops = tuple(dict.fromkeys(stops))
        self._running[slot] = _Running(
            request, prompt, frozenset(stops[MAX_STOP_IDS:]), -1 if params.logprobs is None else params.logprobs
        )
        self._slot_of[request.id] = slot
        last = self.limits.last_position(request)
        self.kv.reserve(slot, self.kv.blocks_for(last))
        self._prompt_len[slot] = len(prompt)
        self._computed[slot] = 0
        self._limit[slot] = last
        self._count[slot] = 0
        self._done[slot] = False
        self._streaming[slot] = request.streaming
        self._special[slot] = params.logprobs is not None or len(stops) > MAX_STOP_IDS
        self._last_named[slot] = -1
        self._context.append(slot)
        self._tell_device(slot, len(prompt), params, seed, stops)
        return slot

    def _tell_device(
        self, slot: int, prompt_len: int, params: SamplingParams, seed: int, stops: tuple[int, ...]
    ) -> None:
        updates = self._updates
        updates.set("position", slot, prompt_len - 1)
        updates.set("min_position", slot, prompt_len + params.min_tokens)
        updates.set("temperature", slot, params.temperature)
        updates.set("top_k", slot, max(params.top_k, 0))
        updates.set("top_p", slot, params.top_p)
        updates.set("min_p", slot, params.min_p)
        updates.set_seed(slot, seed)
        updates.set_stop_ids(slot, stops)

    def _form(self, chunks: list[tuple[int, int]]) -> Step:
        generating = self._generating
        starts = self._computed[generating]
        if chunks:
            slots = np.concatenate([generating, np.array([slot for slot, _ in chunks], np.int32)])
            sizes = np.concatenate([np.ones(len(generating), np.int64), [size for _, size in chunks]])
            reads = tuple(self._chunk(slot, size) for slot, size in chunks)
        else:
            slots, sizes, reads = generating, 1, ()
        after = self._computed[slots] + sizes
        self._grant(slots, after)
        self._computed[slots] = after
        emits = np.ones(len(slots), bool)
        for row, (slot, _) in enumerate(chunks, start=len(generating)):
            emits[row] = self._prompt_left(slot) == 0

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
        self._last_named[slots] = step.index
        self._next_index += 1
        self._advance(slots, after, emits, bool(chunks))
        return step

    def _chunk(self, slot: int, size: int) -> Chunk:
        running = self._running[slot]
        assert running is not None
        start = int(self._computed[slot])
        return Chunk(start, running.prompt[start : start + size])

    def _grant(self, slots: np.ndarray, after: np.ndarray) -> None:
        if not self.kv.short(slots, after).any():
            return
        wanted = np.minimum(after + GRANT_AHEAD, self._limit[slots])
        grant = self.kv.grant(slots, np.maximum(wanted, after))
        self._updates.set_blocks(grant.slots, grant.columns, grant.blocks)

    def _take_updates(self, generating: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """Pending changes; the list of generating slots is brought up to date when the step reads it (decode only)."""
        if generating is not None and not np.array_equal(generating, self._on_device):
            self._updates.set_batch(generating)
            self._on_device = generating
        return self._updates.take() if len(self._updates) else None

    def _advance(self, slots: np.ndarray, after: np.ndarray, emits: np.ndarray, had_context: bool) -> None:
        """Which slots generate from here on: those that emitted and have not read all they may."""
        more = after < self._limit[slots]
        if had_context:
            self._context = [slot for slot in self._context if self._prompt_left(slot) > 0]
            self._generating = slots[emits & more]
        elif not more.all():
            self._generating = slots[more]

    def _logprob_rows(self, slots: np.ndarray, emits: np.ndarray) -> tuple[np.ndarray, int] | None:
        rows = np.flatnonzero(self._special[slots] & emits)
        wanted = [(row, running.num_logprobs) for row in rows if (running := self._running[slots[row]]) is not None]
        wanted = [(row, count) for row, count in wanted if count >= 0]
        if not wanted:
            return None
        return np.array([row for row, _ in wanted]), max(count for _, count in wanted)

    # -- results in --------------------------------------------------------------------------------------------------

    def absorb(self, step: Step, result: StepResult) -> list[Response]:
        """Take in what a step produced; returns what there is to say, in the order of the rows."""
        rows = np.flatnonzero(step.emits & ~self._done[step.slots])
        slots = step.slots[rows]
        tokens = result.tokens[rows]
        stopped = tokens < 0
        tokens = np.where(stopped, -1 - tokens, tokens)
        counts = self._count[slots]
        if counts.size and counts.max() >= self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, self._tokens.shape[1])))
        self._tokens[slots, counts] = tokens
        self._count[slots] = counts + 1

        special = self._special[slots]
        if special.any():
            stopped = stopped | self._absorb_special(slots, tokens, special, rows, result.logprobs)
        ended = stopped | (self._prompt_len[slots] + self._count[slots] > self._limit[slots])
        for slot, by_stop in zip(slots[ended], stopped[ended], strict=True):
            self._finish(int(slot), "stop" if by_stop else "length")

        responses = [self._say(int(slot)) for slot in slots[self._streaming[slots] & ~ended]]
        return responses + self.release(step.index)

    def _absorb_special(
        self, slots: np.ndarray, tokens: np.ndarray, special: np.ndarray, rows: np.ndarray, found: StepLogprobs | None
    ) -> np.ndarray:
        """Log-probabilities, and stop tokens beyond those that the device knows. Returns which rows these stopped."""
        stopped = np.zeros(len(slots), bool)
        place = {int(row): i for i, row in enumerate(found.rows)} if found is not None else {}
        for i in np.flatnonzero(special):
            running = self._running[slots[i]]
            assert running is not None
            token = int(tokens[i])
            generated = int(self._count[slots[i]])
            stopped[i] = token in running.late_stops and generated > running.request.sampling.min_tokens
            if running.num_logprobs >= 0 and found is not None:
                at = place[int(rows[i])]
                keep = slice(0, running.num_logprobs)
                top = dict(zip(found.top_ids[at][keep].tolist(), found.top_values[at][keep].tolist(), strict=True))
                entry = TokenLogprobs(token, float(found.chosen[at]), int(found.ranks[at]), top)
                running.logprobs = (*running.logprobs, entry)
        return stopped

    def cancel(self, request_id: int, completed: int) -> list[Response]:
        """Stop a request; `completed` is the index of the last step whose result was taken in."""
        slot = self._slot_of.get(request_id)
        if slot is not None:
            if not self._done[slot]:
                self._finish(slot, "cancelled")
            return self.release(completed)
        for entry in self._waiting:
            if entry[0].id == request_id:
                self._waiting.remove(entry)
                return [Response(request_id, Output(np.empty(0, np.int32), "cancelled"), final=True)]
        return []

    def _finish(self, slot: int, reason: FinishReason) -> None:
        running = self._running[slot]
        assert running is not None
        running.reason = reason
        self._done[slot] = True
        self._leaving.append(slot)
        if slot in self._context:
            self._context.remove(slot)
        self._generating = self._generating[self._generating != slot]

    def _say(self, slot: int) -> Response:
        """What is new about a slot's request since it was last told."""
        running = self._running[slot]
        assert running is not None
        count = int(self._count[slot])
        new = self._tokens[slot, running.sent : count].copy()
        running.sent = count
        logprobs, running.logprobs = running.logprobs, ()
        return Response(
            running.request.id, Output(new, running.reason, logprobs), final=running.reason is not None, error=""
        )

    def release(self, completed: int) -> list[Response]:
        """Give back the slots that no step after `completed` names, and answer their requests for the last time."""
        responses = []
        for slot in [slot for slot in self._leaving if self._last_named[slot] <= completed]:
            self._leaving.remove(slot)
            responses.append(self._say(slot))
            running = self._running[slot]
            assert running is not None
            del self._slot_of[running.request.id]
            self._running[slot] = None
            self.kv.free(slot)
            self._free_slots.append(slot)
        return responses

    def abandon(self, message: str) -> list[Response]:
        """Answer every request with an error and forget it: the device failed, or the engine shuts down."""
        ids = [*self._slot_of, *(request.id for request, _ in self._waiting)]
        for slot in self._slot_of.values():
            self.kv.free(slot)
            self._running[slot] = None
            self._done[slot] = True
            self._free_slots.append(slot)
        self._slot_of.clear()
        self._waiting.clear()
        self._context.clear()
        self._leaving.clear()
        self._generating = np.empty(0, np.int32)
        self._updates.take()
        empty = Output(np.empty(0, np.int32), "error")
        return [Response(request_id, empty, final=True, error=message) for request_id in ids]
