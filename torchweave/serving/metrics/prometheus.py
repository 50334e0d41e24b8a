"""`/metrics`: what was counted, in Prometheus' format, with the meanings of vLLM's metrics under `torchweave_`.

Nothing is kept here: the collector reads the counts and the engine's last statistics when somebody scrapes. Each server has a
registry of its own.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.routing import Match, Route

import torchweave
from torchweave.serving.engine_client.counters import BucketHistogram
from torchweave.serving.engine_client.request_metrics import ServingCounters
from torchweave.serving.ipc.messages import ModelCard

PREFIX = "torchweave_"
_CLIENT_CLOSED_REQUEST = 499
_Scope = dict[str, Any]


class Engine(Protocol):
    """What is read of an engine client."""

    restarts: int
    model: ModelCard | None

    @property
    def counts(self) -> ServingCounters: ...

    @property
    def state(self) -> str: ...

    @property
    def stats(self) -> dict[str, Any]: ...

    @property
    def prefix_cache_tokens(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class MetricSpec:
    """One metric: its name without prefix, what it means, and where its value is."""

    name: str
    meaning: str
    value: Callable[[ServingCounters], float | BucketHistogram]


# Names, units and meanings of vLLM's metrics where it has one; docs/operations.md tells them to people.
COUNTERS = (
    MetricSpec("prompt_tokens", "Prompt tokens of requests that had their first token", lambda c: c.prompt_tokens),
    MetricSpec("generation_tokens", "Tokens that were generated", lambda c: c.generation_tokens),
    MetricSpec("requests_refused", "Requests that the engine said it can never run", lambda c: c.refused),
    MetricSpec("iterations", "Iterations of the engine", lambda c: c.iterations),
    MetricSpec(
        "compiles_after_ready",
        "Compiles after the engine was ready: there should be none",
        lambda c: c.compiles_after_ready,
    ),
)
HISTOGRAMS = (
    MetricSpec("time_to_first_token_seconds", "From a request's arrival to its first token", lambda c: c.first_token),
    MetricSpec(
        "inter_token_latency_seconds",
        "Between two responses with tokens of a streamed request",
        lambda c: c.inter_token,
    ),
    MetricSpec(
        "time_per_output_token_seconds",
        "Mean time between tokens of a finished request, without the first",
        lambda c: c.per_output_token,
    ),
    MetricSpec("e2e_request_latency_seconds", "From a request's arrival to its end", lambda c: c.latency),
    MetricSpec(
        "request_queue_time_seconds",
        "From a request's arrival to the step that begins to read its prompt",
        lambda c: c.queue,
    ),
    MetricSpec("request_prompt_tokens", "Prompt tokens of a finished request", lambda c: c.request_prompt),
    MetricSpec("request_generation_tokens", "Generated tokens of a finished request", lambda c: c.request_generation),
    MetricSpec("iteration_tokens", "Tokens of an iteration, read and drawn", lambda c: c.iteration_tokens),
    MetricSpec("iteration_seconds", "Wall-clock time of an iteration", lambda c: c.iteration_seconds),
)


GAUGES: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    ("num_requests_running", "Requests that take part in steps", lambda now: now.running),
    ("num_requests_waiting", "Requests that wait for their first step", lambda now: now.waiting),
    ("num_requests_paused", "Requests that ran, gave their blocks back, and wait to go on", lambda now: now.paused),
    ("kv_cache_usage_perc", "Part of the KV cache's blocks that requests hold; 1 is all", lambda now: now.usage),
    ("kv_cache_blocks", "Blocks of the KV cache", lambda now: now.blocks),
)
CACHE_COUNTERS: tuple[tuple[str, str, Callable[[EngineSnapshot], int]], ...] = (
    ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache", lambda now: now.queries),
    ("prefix_cache_hits", "Prompt tokens that were found there, and not read again", lambda now: now.hits),
)


class HttpRequestCounters:
    """HTTP requests by method, path (the route's, so that there are few) and status.

    Args:
        routes: of the application.

    Attributes:
        requests: of this process.
        remote: of the other HTTP processes of the server, as far as they have told.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.remote: Sequence[Counter[tuple[str, str, str]]] = ()

    @property
    def all_requests(self) -> Counter[tuple[str, str, str]]:
        return sum(self.remote, self.requests)

    def count(self, scope: _Scope, status: int) -> None:
        """An answer has begun. What was refused before its route was looked for has the path of that one, if there is one."""
        path = getattr(scope.get("route"), "path", None)
        if path is None:
            matching_paths = (route.path for route in self._routes if route.matches(scope)[0] != Match.NONE)
            path = next(matching_paths, "other")
        self.requests[str(scope["method"]), path, str(status)] += 1


STREAM_SEND = "torchweave.send"
"""In a scope: where the parts of a body may go once an answer has begun, past the layers that look for its beginning."""
PROXIED = "torchweave.relayed"
"""In a scope: another HTTP process of the server answers, and counts."""


class HttpMetricsMiddleware:
    """ASGI middleware around an application: counts each request once it is over. 499 (nginx's number): the client left before
    there was an answer."""

    def __init__(self, app: Any, counts: HttpRequestCounters) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_CLOSED_REQUEST
        scope[STREAM_SEND] = send

        async def counting_send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except Exception:
            status = 500 if status == _CLIENT_CLOSED_REQUEST else status
            raise
        finally:
            # It knows the scope, which knows it: all that the request was would wait for the collector of cycles.
            del scope[STREAM_SEND]
            if not scope.get(PROXIED):
                self._counts.count(scope, status)


class PrometheusMetrics(Collector):
    """The metrics of one server.

    Args:
        engines: the engine clients. Of several, each has its own series, with a label `replica`.
        http: the HTTP requests.
        model_name: the label of everything about the model.
    """

    def __init__(self, engines: Sequence[Engine], http: HttpRequestCounters, model_name: str) -> None:
        self._engines, self._http = engines, http
        several = len(engines) > 1
        self._labels = ["model_name", "replica"] if several else ["model_name"]
        self._values = [[model_name, str(number)] if several else [model_name] for number in range(len(engines))]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and its content type, for a request's `Accept` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> list[Metric]:
        return []  # nothing else is in the registry that a name could collide with

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engines()
        counts = [engine.counts for engine in self._engines]
        for family in COUNTERS:
            yield self._counter(family.name, family.meaning, map(family.value, counts))
        for family in HISTOGRAMS:
            yield self._histogram(family, map(family.value, counts))
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Requests that ended, by reason", labels=[*self._labels, "finished_reason"]
        )
        for labels, each in zip(self._values, counts, strict=True):
            for reason, count in each.reasons.items():
                ended.add_metric([*labels, reason], count)
        yield ended
        yield self._of_http()
        build = {"version": torchweave.__version__, "python": platform.python_version()}
        info = GaugeMetricFamily(PREFIX + "build_info", "What runs; always 1", labels=list(build))
        info.add_metric(list(build.values()), 1)
        yield info

    def _of_engines(self) -> Iterator[Metric]:
        engines, now = self._engines, [EngineSnapshot.of(engine) for engine in self._engines]
        ready = (float(engine.state == "ready") for engine in engines)
        yield self._gauge("engine_up", "1 while the engine takes requests, else 0", ready)
        restarts = (engine.restarts for engine in engines)
        yield self._counter("engine_restarts", "Times that the engine was started again", restarts)
        for name, meaning, value in GAUGES:
            yield self._gauge(name, meaning, map(value, now))
        for name, meaning, value in CACHE_COUNTERS:
            yield self._counter(name, meaning, map(value, now))

    def _of_http(self) -> Metric:
        found = CounterMetricFamily(
            PREFIX + "http_requests", "HTTP requests that were answered", labels=["method", "path", "status"]
        )
        for labels, count in sorted(self._http.all_requests.items()):
            found.add_metric(labels, count)
        return found

    # -- one family, with a value of each engine -----------------------------------------------------------------------

    def _gauge(self, name: str, meaning: str, values: Iterable[float]) -> Metric:
        found = GaugeMetricFamily(PREFIX + name, meaning, labels=self._labels)
        for labels, value in zip(self._values, values, strict=True):
            found.add_metric(labels, value)
        return found

    def _counter(self, name: str, meaning: str, values: Iterable[Any]) -> Metric:
        found = CounterMetricFamily(PREFIX + name, meaning, labels=self._labels)
        for labels, value in zip(self._values, values, strict=True):
            found.add_metric(labels, value)
        return found

    def _histogram(self, family: MetricSpec, values: Iterable[Any]) -> Metric:
        found = HistogramMetricFamily(PREFIX + family.name, family.meaning, labels=self._labels)
        for labels, value in zip(self._values, values, strict=True):
            found.add_metric(labels, value.cumulative(), value.sum)
        return found


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine's last statistics as few numbers; before the first, what is known of its blocks, and else 0.

    Attributes:
        queries, hits: tokens of whole prompt blocks that were looked up among kept ones, and found, over all its lives.
    """

    running: int
    waiting: int
    paused: int
    blocks: int
    used: int
    tokens_per_block: int
    queries: int
    hits: int

    @classmethod
    def of(cls, engine: Engine) -> EngineSnapshot:
        stats, card = engine.stats, engine.model
        num_blocks, block_size = (card.num_kv_blocks, card.block_size) if card is not None else (0, 0)
        queries, hits = engine.prefix_cache_tokens
        paused = stats.get("inflightBatchingStats", {}).get("numPausedRequests", 0)
        return cls(
            running=stats.get("numRunningRequests", 0),
            waiting=max(stats.get("numQueuedRequests", 0) - paused, 0),
            paused=paused,
            blocks=stats.get("Max KV cache blocks", num_blocks),
            used=stats.get("Used KV cache blocks", 0),
            tokens_per_block=stats.get("kvCacheStats", {}).get("tokensPerBlock", block_size),
            queries=queries,
            hits=hits,
        )

    @classmethod
    def merge(cls, parts: Sequence[EngineSnapshot]) -> EngineSnapshot:
        """Of several engines with blocks of one size."""
        sums = {item.name: sum(getattr(part, item.name) for part in parts) for item in fields(cls)}
        return cls(**sums | {"tokens_per_block": max(part.tokens_per_block for part in parts)})

    @property
    def usage(self) -> float:
        return self.used / self.blocks if self.blocks else 0.0
