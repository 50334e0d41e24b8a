"""What goes between the HTTP process and the engine, watched from the HTTP side: each request's times, and each iteration.

The engine client calls `RequestMetrics` as things happen; `metrics.py` and `live.py` read it. Prompts and answers are not kept.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from torchweave.serving.engine_client.counters import (
    BETWEEN_TOKENS_SECONDS,
    FIRST_TOKEN_SECONDS,
    ITERATION_TOKENS,
    REQUEST_SECONDS,
    REQUEST_TOKENS,
    BucketHistogram,
    History,
)

HISTORY_SECONDS = 180
_NUM_RECENT_REQUESTS = 40
_NUM_RECENT_VALUES = 1000  # of which percentiles of now are taken
_MAX_OPEN_SHOWN = 40


@dataclass(slots=True)
class RequestRecord:
    """One answer in the making; times by the traffic's clock, 0 where it has not come to that.

    Attributes:
        started: when the engine began to read the prompt.
        first_token_at: when its first token came; of one that is not streamed, when the engine drew it.
        paused: it ran, and waits to go on.
        pending_prefill_tokens: tokens of the prompt that the engine has to read, until it has.
        by_stop_string: a stop string ended it, which the engine does not know: it says `cancelled`, or what came before it heard.
        reason: why it ended; empty while it has not.
    """

    id: int
    num_prompt: int
    arrived: float
    streaming: bool
    started: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    paused: bool = False
    pending_prefill_tokens: int = 0
    by_stop_string: bool = False
    ended: float = 0.0
    reason: str = ""

    @property
    def state(self) -> str:
        """Why it ended, or what it does: `waiting`, `reading`, `answering` or `paused`."""
        if self.reason or self.paused:
            return self.reason or "paused"
        return "answering" if self.first_token_at else "reading" if self.started else "waiting"


@dataclass
class ServingCounters:
    """What was counted since the server began, over all lives of the engine."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    refused: int = 0
    iterations: int = 0
    compiles_after_ready: int = 0
    first_token: BucketHistogram = field(
        default_factory=lambda: BucketHistogram(FIRST_TOKEN_SECONDS, _NUM_RECENT_VALUES)
    )
    inter_token: BucketHistogram = field(
        default_factory=lambda: BucketHistogram(BETWEEN_TOKENS_SECONDS, _NUM_RECENT_VALUES)
    )
    per_output_token: BucketHistogram = field(default_factory=lambda: BucketHistogram(BETWEEN_TOKENS_SECONDS))
    latency: BucketHistogram = field(default_factory=lambda: BucketHistogram(REQUEST_SECONDS))
    queue: BucketHistogram = field(default_factory=lambda: BucketHistogram(REQUEST_SECONDS))
    request_prompt: BucketHistogram = field(default_factory=lambda: BucketHistogram(REQUEST_TOKENS))
    request_generation: BucketHistogram = field(default_factory=lambda: BucketHistogram(REQUEST_TOKENS))
    iteration_tokens: BucketHistogram = field(default_factory=lambda: BucketHistogram(ITERATION_TOKENS))
    iteration_seconds: BucketHistogram = field(
        default_factory=lambda: BucketHistogram(BETWEEN_TOKENS_SECONDS, _NUM_RECENT_VALUES)
    )

    @classmethod
    def merge(cls, parts: Sequence[ServingCounters]) -> ServingCounters:
        """What several engines have done."""
        found: dict[str, Any] = {}
        for item in fields(cls):
            values = [getattr(part, item.name) for part in parts]
            if isinstance(values[0], BucketHistogram):
                found[item.name] = BucketHistogram.merge(values)
            elif isinstance(values[0], dict):
                names = dict.fromkeys(name for value in values for name in value)
                found[item.name] = {name: sum(value.get(name, 0) for value in values) for name in names}
            else:
                found[item.name] = sum(values)
        return cls(**found)


@dataclass
class RequestMetricsData:
    """The part of `RequestMetrics` that other HTTP processes read.

    Attributes:
        open: unfinished requests by id.
        recent: the requests that finished last, newest first.
        history: tokens and step times by second.
    """

    counts: ServingCounters = field(default_factory=ServingCounters)
    open: dict[int, RequestRecord] = field(default_factory=dict)
    recent: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_REQUESTS))
    history: History = field(default_factory=lambda: History(HISTORY_SECONDS, ("generated", "read", "ended")))


class RequestMetrics(RequestMetricsData):
    """Metrics of the requests of one engine client. Used from its event loop only.

    Attributes:
        pending_prefill_tokens: prompt tokens of submitted requests that the engine has not prefilled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.began = clock()
        self.pending_prefill_tokens = 0

    # -- what the client tells -----------------------------------------------------------------------------------------

    def submitted(self, request_id: int, num_prompt: int, streaming: bool, num_cached_tokens: int = 0) -> None:
        """A request goes to the engine, which has read `num_cached_tokens` tokens of its prompt before."""
        record = RequestRecord(
            request_id, num_prompt, self.clock(), streaming, pending_prefill_tokens=num_prompt - num_cached_tokens
        )
        self.open[request_id] = record
        self.pending_prefill_tokens += record.pending_prefill_tokens

    def refused(self, request_id: int) -> None:
        """The engine said that it can never run it."""
        record = self.open.pop(request_id, None)
        if record is not None:
            self._prefill_finished(record)
            self.counts.refused += 1

    def state_changed(self, moves: Iterable[tuple[int, str]]) -> None:
        """Requests that `started`, were `paused`, or are `answering`."""
        now = self.clock()
        for request_id, move in moves:
            record = self.open.get(request_id)
            if record is None:
                continue
            record.paused = move == "paused"
            if move == "started" and not record.started:
                record.started = now
                self.counts.queue.observe(now - record.arrived)
            elif move == "answering" and not record.streaming and not record.first_token_at:
                record.first_token_at = now
                self.counts.first_token.observe(now - record.arrived)
                self._prefill_finished(record)

    def stopped_by_string(self, ids: Iterable[int]) -> None:
        """A stop string ended these; their last responses are still to come."""
        for request_id in ids:
            if request_id in self.open:
                self.open[request_id].by_stop_string = True

    def response_received(self, request_id: int, num_tokens: int, reason: str | None) -> None:
        """A response came; `reason` where it is the last."""
        record = self.open.get(request_id)
        if record is None:
            return
        now = self.clock()
        if num_tokens:
            self._count_tokens(record, num_tokens, now)
        if reason is not None:
            del self.open[request_id]
            by_stop_string = reason == "complete" or (record.by_stop_string and reason != "error")
            self._request_ended(record, "stop" if by_stop_string else reason, now)  # as clients are told

    def iterations_finished(self, iterations: Sequence[tuple[float, int, int]]) -> None:
        """Iterations since the last call: seconds, prompt tokens that were read, tokens that were drawn."""
        counts = self.counts
        counts.iterations += len(iterations)
        for seconds, read, drawn in iterations:
            counts.iteration_seconds.observe(seconds)
            counts.iteration_tokens.observe(read + drawn)
        self.history.add(
            self.clock(),
            [each[0] for each in iterations],
            read=sum(each[1] for each in iterations),
            generated=sum(each[2] for each in iterations),
        )

    def event(self, kind: str) -> None:
        """An event of the engine's report."""
        if kind == "compile_after_ready":
            self.counts.compiles_after_ready += 1

    def _count_tokens(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        counts = self.counts
        record.num_tokens += num_tokens
        counts.generation_tokens += num_tokens
        if record.last_token_at:
            counts.inter_token.observe(now - record.last_token_at)
        else:
            counts.prompt_tokens += record.num_prompt
            self._prefill_finished(record)
            if record.streaming:  # else the engine tells of it: the only response comes at the end
                record.first_token_at = now
                counts.first_token.observe(now - record.arrived)
        record.last_token_at = now

    def _prefill_finished(self, record: RequestRecord) -> None:
        """There is nothing left of a prompt to be read."""
        self.pending_prefill_tokens -= record.pending_prefill_tokens
        record.pending_prefill_tokens = 0

    def _request_ended(self, record: RequestRecord, reason: str, now: float) -> None:
        counts = self.counts
        self._prefill_finished(record)
        record.ended, record.reason = now, reason
        self.recent.appendleft(record)
        self.history.add(now, ended=1)
        counts.reasons[reason] = counts.reasons.get(reason, 0) + 1
        counts.latency.observe(now - record.arrived)
        counts.request_prompt.observe(record.num_prompt)
        counts.request_generation.observe(record.num_tokens)
        if record.num_tokens > 1 and record.first_token_at:
            counts.per_output_token.observe((now - record.first_token_at) / (record.num_tokens - 1))


def visible_requests(all_request_metrics: Sequence[RequestMetricsData]) -> list[RequestRecord]:
    """Answers of several engines for people: those under way, the newest first, then those that ended last."""
    newest = [
        list(reversed(request_metrics.open.values()))[:_MAX_OPEN_SHOWN] for request_metrics in all_request_metrics
    ]
    under_way = heapq.merge(*newest, key=lambda record: -record.arrived)
    ended = heapq.merge(
        *(request_metrics.recent for request_metrics in all_request_metrics), key=lambda record: -record.ended
    )
    return [*islice(under_way, _MAX_OPEN_SHOWN), *islice(ended, _NUM_RECENT_REQUESTS)]
