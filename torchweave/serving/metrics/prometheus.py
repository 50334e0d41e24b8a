"""`/metrics`: counters in Prometheus' format, with the semantics of vLLM's metrics and the prefix `torchweave_`.

The collector reads the counters and the engine's last statistics at each scrape. Each server has its own registry.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.routing import Match, Route

import torchweave
from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.request_warnings import WarningCounts

PREFIX = "torchweave_"
_Scope = dict[str, Any]


# Names, units and semantics of vLLM's metrics if it has them; documented in docs/reference/metrics.md.
COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that have their first token", "prompt_tokens"),
    ("generation_tokens", "Generated tokens", "generation_tokens"),
    ("requests_refused", "Requests that the engine refused because it can never run them", "refused"),
    ("iterations", "Iterations of the engine", "iterations"),
    ("invalid_logits", "Requests ended because the model's logits were not finite", "invalid_logits"),
    ("compiles_after_ready", "Compilations after the engine was ready; expected: 0", "compiles_after_ready"),
)
"""Name without prefix, help text, and field of `ServingCounters`."""
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from a request's arrival to its first token", "first_token"),
    ("inter_token_latency_seconds", "Time between two token responses of a streamed request", "inter_token"),
    (
        "time_per_output_token_seconds",
        "Mean time per output token of a finished request, excluding the first",
        "per_output_token",
    ),
    ("e2e_request_latency_seconds", "Time from a request's arrival to its end", "latency"),
    ("request_queue_time_seconds", "Time from a request's arrival to the first step of its prefill", "queue"),
    ("request_prompt_tokens", "Prompt tokens of a finished request", "request_prompt"),
    ("request_generation_tokens", "Generated tokens of a finished request", "request_generation"),
    ("iteration_tokens", "Tokens of an iteration, prefilled and sampled", "iteration_tokens"),
    ("iteration_seconds", "Wall-clock time of an iteration", "iteration_seconds"),
)
GAUGES = (
    ("num_requests_running", "Running requests", "running"),
    ("num_requests_waiting", "Requests that wait for their first step", "waiting"),
    ("num_requests_paused", "Preempted requests that wait to resume", "paused"),
    ("kv_cache_usage_perc", "Fraction of the KV cache's blocks in use, 0 to 1", "usage"),
    ("kv_cache_blocks", "Blocks of the KV cache", "blocks"),
)
"""Name, help text, and attribute of `EngineSnapshot`."""
CACHE_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "hits"),
)
SPECULATION_COUNTERS = (
    ("num_drafts", "Rows of steps with drafts"),
    ("num_draft_tokens", "Drafts"),
    ("num_accepted_tokens", "Drafts that were accepted"),
)
"""Counters of an engine with speculation, and their names in its statistics."""


class HttpRequestCounters:
    """HTTP requests by method, path (the route's, to bound the number of labels) and status.

    Args:
        routes: of the application.

    Attributes:
        requests: of this process.
        remote: of the other HTTP processes, as of the last poll.
        warnings: warnings of requests, of all HTTP processes.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.remote: Sequence[Counter[tuple[str, str, str]]] = ()
        self.warnings = WarningCounts()

    @property
    def all_requests(self) -> Counter[tuple[str, str, str]]:
        return sum(self.remote, self.requests)

    def count(self, scope: _Scope, status: int) -> None:
        """Count a request. Requests rejected before routing get the path of the route that would have matched."""
        path = getattr(scope.get("route"), "path", None)
        if path is None:
            matching_paths = (route.path for route in self._routes if route.matches(scope)[0] != Match.NONE)
            path = next(matching_paths, "other")
        self.requests[str(scope["method"]), path, str(status)] += 1


class PrometheusMetrics(Collector):
    """The metrics of one server.

    Args:
        engines: the engine clients. With several, each has its own series with a label `replica`.
        http: the HTTP requests.
        model_name: the label of everything about the model.
    """

    def __init__(self, engines: Sequence[EngineClient], http: HttpRequestCounters, model_name: str) -> None:
        self._engines, self._http = engines, http
        has_replicas = len(engines) > 1
        self._labels = ["model_name", "replica"] if has_replicas else ["model_name"]
        self._values = [[model_name, str(number)] if has_replicas else [model_name] for number in range(len(engines))]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics as text and its content type, for a request's `Accept` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> list[Metric]:
        return []  # the registry has no other collector whose names could collide

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engines()
        counts = [engine.counts for engine in self._engines]
        for name, meaning, field in COUNTERS:
            yield self._counter(name, meaning, map(attrgetter(field), counts))
        for name, meaning, field in HISTOGRAMS:
            yield self._histogram(name, meaning, map(attrgetter(field), counts))
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Finished requests by finish reason", labels=[*self._labels, "finished_reason"]
        )
        for labels, each in zip(self._values, counts, strict=True):
            for reason, count in each.reasons.items():
                ended.add_metric([*labels, reason], count)
        yield ended
        requests = CounterMetricFamily(
            PREFIX + "http_requests", "Answered HTTP requests", labels=["method", "path", "status"]
        )
        for labels, count in sorted(self._http.all_requests.items()):
            requests.add_metric(labels, count)
        yield requests
        warnings = CounterMetricFamily(
            PREFIX + "request_warnings", "Parts of requests that had no effect, such as unknown fields", labels=["kind"]
        )
        for kind, count in sorted(self._http.warnings.all_kinds.items()):
            warnings.add_metric([kind], count)
        yield warnings
        build = {"version": torchweave.__version__, "python": platform.python_version()}
        info = GaugeMetricFamily(PREFIX + "build_info", "Versions; always 1", labels=list(build))
        info.add_metric(list(build.values()), 1)
        yield info

    def _of_engines(self) -> Iterator[Metric]:
        engines, now = self._engines, [EngineSnapshot.of(engine) for engine in self._engines]
        ready = (float(engine.state == "ready") for engine in engines)
        yield self._gauge("engine_up", "1 while the engine accepts requests, else 0", ready)
        restarts = (engine.restarts for engine in engines)
        yield self._counter("engine_restarts", "Restarts of the engine", restarts)
        for name, meaning, field in GAUGES:
            yield self._gauge(name, meaning, map(attrgetter(field), now))
        for name, meaning, field in CACHE_COUNTERS:
            yield self._counter(name, meaning, map(attrgetter(field), now))
        yield from self._of_speculation([engine.stats.get("spec_decode", {}) for engine in engines])

    def _of_speculation(self, counts: Sequence[dict[str, Any]]) -> Iterator[Metric]:
        """The counters of engines with speculation, once one of them has run a step."""
        if not any(counts):
            return
        for name, meaning in SPECULATION_COUNTERS:
            yield self._counter(f"spec_decode_{name}", meaning, [each.get(name, 0) for each in counts])
        by_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their position behind the last token",
            labels=[*self._labels, "position"],
        )
        for labels, each in zip(self._values, counts, strict=True):
            for position, count in enumerate(each.get("num_accepted_tokens_per_pos", ())):
                by_position.add_metric([*labels, str(position)], count)
        yield by_position

    # -- one family, with a value of each engine -----------------------------------------------------------------------

    def _gauge(self, name: str, meaning: str, values: Iterable[float]) -> Metric:
        return self._filled(GaugeMetricFamily(PREFIX + name, meaning, labels=self._labels), values)

    def _counter(self, name: str, meaning: str, values: Iterable[Any]) -> Metric:
        return self._filled(CounterMetricFamily(PREFIX + name, meaning, labels=self._labels), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[float]) -> Metric:
        for labels, value in zip(self._values, values, strict=True):
            family.add_metric(labels, value)
        return family

    def _histogram(self, name: str, meaning: str, values: Iterable[Any]) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, meaning, labels=self._labels)
        for labels, value in zip(self._values, values, strict=True):
            family.add_metric(labels, value.cumulative(), value.sum)
        return family


@dataclass(frozen=True)
class EngineSnapshot:
    """Summary of the engine's last statistics; before the first, block counts of the model card and otherwise 0.

    Attributes:
        queries, hits: see `EngineClient.prefix_cache_tokens`.
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
    def of(cls, engine: EngineClient) -> EngineSnapshot:
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
        """Sum the snapshots of engines with equal block sizes."""
        sums = {item.name: sum(getattr(part, item.name) for part in parts) for item in fields(cls)}
        return cls(**sums | {"tokens_per_block": max(part.tokens_per_block for part in parts)})

    @property
    def usage(self) -> float:
        return self.used / self.blocks if self.blocks else 0.0
