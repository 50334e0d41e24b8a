"""Metrics of requests and engine iterations, measured in the HTTP process.

The engine client calls `RequestMetrics`; `metrics/prometheus.py` and `metrics/live.py` read it. Texts are not stored.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
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
_NUM_RECENT_VALUES = 1000  # for current percentiles
NUM_PAGE_ROWS = 14
"""Requests in the table of the live page; `ROWS` of its script."""
_NUM_RUNNING_ROWS, _NUM_WAITING_ROWS = 8, 3


@dataclass(slots=True)
class RequestRecord:
    """One engine request. Times are in seconds of `RequestMetrics.clock`, 0 before the event.

    Attributes:
        started: start of prefill.
        first_token_at: arrival of the first token; if not streamed, when the engine sampled it.
        paused: preempted.
        pending_prefill_tokens: prompt tokens to prefill; 0 once prefill is done.
        by_stop_string: a stop string completed the answer. The engine does not match stop strings, so it reports `cancelled`,
            or the reason for which the request ended first.
        reason: finish reason; empty while unfinished.
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
        """The finish reason, or `waiting`, `reading` (prefill), `answering` (decode) or `paused`."""
        if self.reason or self.paused:
            return self.reason or "paused"
        return "answering" if self.first_token_at else "reading" if self.started else "waiting"


@dataclass
class ServingCounters:
    """Counters since the server's start, over all restarts of the engine."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    refused: int = 0
    iterations: int = 0
    compiles_after_ready: int = 0
    invalid_logits: int = 0
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
        """Sum the counters of several engines or HTTP processes."""
        sums: dict[str, Any] = {}
        for item in fields(cls):
            values = [getattr(part, item.name) for part in parts]
            if isinstance(values[0], BucketHistogram):
                sums[item.name] = BucketHistogram.merge(values)
            elif isinstance(values[0], dict):
                names = dict.fromkeys(name for value in values for name in value)
                sums[item.name] = {name: sum(value.get(name, 0) for value in values) for name in names}
            else:
                sums[item.name] = sum(values)
        return cls(**sums)


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

    # -- called by the engine client -----------------------------------------------------------------------------------

    def submitted(self, request_id: int, num_prompt: int, streaming: bool, num_cached_tokens: int = 0) -> None:
        """A request was submitted; `num_cached_tokens` of its prompt are in the engine's prefix cache."""
        record = RequestRecord(
            request_id, num_prompt, self.clock(), streaming, pending_prefill_tokens=num_prompt - num_cached_tokens
        )
        self.open[request_id] = record
        self.pending_prefill_tokens += record.pending_prefill_tokens

    def refused(self, request_id: int) -> None:
        """The engine refused a request."""
        record = self.open.pop(request_id, None)
        if record is not None:
            self._prefill_finished(record)
            self.counts.refused += 1

    def state_changed(self, moves: Iterable[tuple[int, str]]) -> None:
        """Requests `started` prefill, were `paused`, or are `answering` (see `RequestStateChanges`)."""
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
        """A stop string completed these requests; their final responses are still to come."""
        for request_id in ids:
            if request_id in self.open:
                self.open[request_id].by_stop_string = True

    def response_received(self, request_id: int, num_tokens: int, reason: str | None) -> None:
        """A response arrived; `reason` is set in the last one."""
        record = self.open.get(request_id)
        if record is None:
            return
        now, counts = self.clock(), self.counts
        if num_tokens:
            record.num_tokens += num_tokens
            counts.generation_tokens += num_tokens
            if record.last_token_at:
                counts.inter_token.observe(now - record.last_token_at)
            else:
                self._first_token_received(record, now)
            record.last_token_at = now
        if reason is not None:
            del self.open[request_id]
            by_stop_string = reason == "complete" or (record.by_stop_string and reason != "error")
            self._request_ended(record, "stop" if by_stop_string else reason, now)  # the client's finish reason

    def iterations_finished(self, iterations: Sequence[tuple[float, int, int]]) -> None:
        """Count iterations: (seconds, prefilled tokens, sampled tokens) each."""
        counts = self.counts
        counts.iterations += len(iterations)
        for seconds, num_prefilled, num_sampled in iterations:
            counts.iteration_seconds.observe(seconds)
            counts.iteration_tokens.observe(num_prefilled + num_sampled)
        self.history.add(
            self.clock(),
            [each[0] for each in iterations],
            read=sum(each[1] for each in iterations),
            generated=sum(each[2] for each in iterations),
        )

    def _first_token_received(self, record: RequestRecord, now: float) -> None:
        self.counts.prompt_tokens += record.num_prompt
        self._prefill_finished(record)
        if record.streaming:  # otherwise `state_changed` reports it: the only response arrives at the end
            record.first_token_at = now
            self.counts.first_token.observe(now - record.arrived)

    def _prefill_finished(self, record: RequestRecord) -> None:
        """Subtract a request's prompt from the pending prefill tokens."""
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
    """Requests to list on the page: running ones, newest first, those that wait longest, then those that finished last.

    Of `NUM_PAGE_ROWS` rows each kind has its share, and more where the others do not fill theirs.
    """
    unfinished = [record for each in all_request_metrics for record in each.open.values()]
    running = [record for record in unfinished if record.state != "waiting"]
    waiting = [record for record in unfinished if record.state == "waiting"]
    finished = [record for each in all_request_metrics for record in each.recent]
    running = heapq.nlargest(NUM_PAGE_ROWS, running, key=lambda record: record.arrived)
    waiting = heapq.nsmallest(NUM_PAGE_ROWS, waiting, key=lambda record: record.arrived)
    ended = heapq.nlargest(_NUM_RECENT_REQUESTS, finished, key=lambda record: record.ended)
    num_running = max(_NUM_RUNNING_ROWS, NUM_PAGE_ROWS - len(ended) - min(len(waiting), _NUM_WAITING_ROWS))
    num_waiting = max(_NUM_WAITING_ROWS, NUM_PAGE_ROWS - len(ended) - min(len(running), num_running))
    return [*running[:num_running], *waiting[:num_waiting], *ended]
