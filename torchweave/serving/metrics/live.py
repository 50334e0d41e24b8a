"""`/live`: the data of the live page as one JSON object, rebuilt at most once per `FRESH_SECONDS`.

All data come from the engine client; the engine process is not queried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

import torchweave
from torchweave.serving.engine_client.client import EngineClient
from torchweave.serving.engine_client.counters import BucketHistogram, Percentiles, percentile
from torchweave.serving.engine_client.request_metrics import (
    HISTORY_SECONDS,
    RequestRecord,
    ServingCounters,
    visible_requests,
)
from torchweave.serving.metrics.prometheus import EngineSnapshot
from torchweave.serving.service import Service

FRESH_SECONDS = 0.25
"""Maximum age of the data, regardless of the number of open pages."""
RATE_SECONDS = 5
"""Window for the tokens per second of a replica."""


class Live:
    """The page's data for one server.

    Args:
        poll_metrics: updates the metrics of the other HTTP processes.
    """

    def __init__(self, service: Service, poll_metrics: Callable[[], Awaitable[None]]) -> None:
        self._service = service
        self._poll_metrics = poll_metrics
        self._engines = service.client.engines
        self._built_at = float("-inf")
        self._build_task: asyncio.Task[None] | None = None
        self._text = b""
        histories = [engine.request_metrics.history for engine in self._engines]
        self._step_times = Percentiles(histories, HISTORY_SECONDS, (50, 99))

    async def text(self) -> bytes:
        """The JSON text, not older than `FRESH_SECONDS`."""
        if self._engines[0].request_metrics.clock() - self._built_at >= FRESH_SECONDS:
            if self._build_task is None or self._build_task.done():
                self._build_task = asyncio.create_task(self._rebuild())
            await asyncio.shield(self._build_task)  # other requests may wait for it too
        return self._text

    async def _rebuild(self) -> None:
        await self._poll_metrics()
        now = self._engines[0].request_metrics.clock()
        self._text, self._built_at = msgspec.json.encode(self.snapshot(now)), now

    def snapshot(self, now: float) -> dict[str, Any]:
        """Build the object documented in `docs/reference/metrics.md`; times in seconds, except for names ending in `_ms`."""
        client = self._service.client
        all_request_metrics = [
            request_metrics for engine in self._engines for request_metrics in engine.all_request_metrics
        ]
        counts = ServingCounters.merge([request_metrics.counts for request_metrics in all_request_metrics])
        snapshots = [EngineSnapshot.of(engine) for engine in self._engines]
        engine = EngineSnapshot.merge(snapshots)
        return {
            "state": "draining" if self._service.draining else self._state(),
            "failure": client.failure,
            "version": torchweave.__version__,
            "uptime": now - self._engines[0].request_metrics.began,
            "model": self._model(),
            "startup": self._startup(),
            "requests": {
                "running": engine.running,
                "waiting": engine.waiting,
                "paused": engine.paused,
                "open": sum(len(request_metrics.open) for request_metrics in all_request_metrics),
                "ended": counts.reasons,
                "refused": counts.refused,
            },
            "blocks": {
                "total": engine.blocks,
                "used": engine.used,
                "tokens_per_block": engine.tokens_per_block,
                "hit_rate": engine.hits / engine.queries if engine.queries else None,
            },
            "steps": {"count": counts.iterations, **_percentiles_ms(counts.iteration_seconds)},
            "speculation": _speculation([each.stats.get("spec_decode", {}) for each in self._engines]),
            "first_token": _percentiles_ms(counts.first_token),
            "inter_token": _percentiles_ms(counts.inter_token),
            "tokens": {"read": counts.prompt_tokens, "generated": counts.generation_tokens},
            "history": self._history(now),
            "replicas": [_replica_summary(*each, now) for each in zip(self._engines, snapshots, strict=True)],
            "recent": [_request_row(record, now) for record in visible_requests(all_request_metrics)],
            "compiled": _compiled(self._engines[0].explanation) | {"compiles_after_ready": counts.compiles_after_ready},
        }

    def _state(self) -> str:
        """State of the engines; `ready` only once the server accepts requests."""
        state = self._service.client.state
        return "starting" if state == "ready" and not self._service.ready else state

    def _model(self) -> dict[str, Any]:
        card = self._service.client.model
        model: dict[str, Any] = {"name": self._service.names[0]}
        if card is not None:
            names = ("architecture", "dtype", "device", "quantization", "num_parameters", "max_model_len")
            model |= {name: getattr(card, name) for name in names} | {"text": card.folder is not None}
            model["max_images"] = card.images.max_images
            model["max_batch_size"] = sum(each.model.max_batch_size for each in self._engines if each.model is not None)
        return model

    def _startup(self) -> dict[str, Any]:
        """Finished stages and progress bars of the first engine that is not ready."""
        engine = next((each for each in self._engines if each.state != "ready"), self._engines[0])
        stages = [event for event in engine.events if event["event"] == "stage"]
        done = {event["name"] for event in stages}
        return {
            "stages": [{"name": event["name"], "seconds": event["seconds"]} for event in stages],
            "bars": [
                {name: bar[name] for name in ("title", "done", "total", "note")}
                for bar in engine.progress
                if bar["title"] not in done
            ],
        }

    def _history(self, now: float) -> dict[str, Any]:
        sums = [
            request_metrics.history.sums(now)
            for engine in self._engines
            for request_metrics in engine.all_request_metrics
        ]
        p50, p99 = self._step_times.of(now)
        return {
            "seconds": HISTORY_SECONDS,
            **{name: [sum(each) for each in zip(*(part[name] for part in sums), strict=True)] for name in sums[0]},
            "step_p50_ms": _milliseconds(p50),
            "step_p99_ms": _milliseconds(p99),
        }


def _replica_summary(engine: EngineClient, numbers: EngineSnapshot, now: float) -> dict[str, Any]:
    """Summary of an engine."""
    card, generated = engine.model, engine.request_metrics.history.sums(now)["generated"][-RATE_SECONDS:]
    return {
        "replica": engine.replica_info.index,
        "state": engine.state,
        "failure": engine.failure,
        "restarts": engine.restarts,
        "device": card.device if card is not None else None,
        "open": sum(len(request_metrics.open) for request_metrics in engine.all_request_metrics),
        "running": numbers.running,
        "generated_per_second": sum(generated) / len(generated),
        "usage": numbers.usage,
        "hit_rate": numbers.hits / numbers.queries if numbers.queries else None,
    }


def _speculation(counts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Drafts of all engines and how many were accepted; None before the first draft and without speculation."""
    rows, drafts, accepted = (
        sum(each.get(f"num_{name}", 0) for each in counts) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not rows:
        return None
    positions = [each.get("num_accepted_tokens_per_pos", ()) for each in counts]
    by_position = [sum(place) / rows for place in zip_longest(*positions, fillvalue=0)]
    return {"drafts": drafts, "accepted": accepted, "tokens_per_row": 1 + accepted / rows, "by_position": by_position}


def _compiled(explanation: dict[str, Any]) -> dict[str, Any]:
    """Summary of passes, pieces and graphs, which are the same for all engines."""
    if not explanation:
        return {"passes": [], "pieces": 0, "distinct_pieces": 0, "graphs": [], "fallbacks": []}
    graphs: dict[tuple[str, str], list[int]] = {}
    for graph in explanation["graphs"]:
        graphs.setdefault((graph["step"], graph["kind"]), []).append(graph["key"])
    return {
        "passes": [
            {"name": each["name"], "matches": each["matches"]}
            for each in explanation["passes"]
            if each["enabled"] and each["matches"]
        ],
        "pieces": sum(piece["shared_by"] for piece in explanation["pieces"]),
        "distinct_pieces": len(explanation["pieces"]),
        "graphs": [{"step": step, "kind": kind, "sizes": sorted(sizes)} for (step, kind), sizes in graphs.items()],
        "fallbacks": [each["what"] for each in explanation["fallbacks"]],
    }


def _percentiles_ms(values: BucketHistogram) -> dict[str, float | None]:
    """Percentiles of the recent values."""
    p50, p99 = percentile(values.recent, 50), percentile(values.recent, 99)
    return {"p50_ms": p50 and p50 * 1e3, "p99_ms": p99 and p99 * 1e3}


def _milliseconds(seconds: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value * 1e3, 3) for value in seconds]


def _request_row(record: RequestRecord, now: float) -> dict[str, Any]:
    """A request for the page's list."""
    end = record.ended or now
    return {
        "id": record.id,
        "state": record.state,
        "prompt": record.num_prompt,
        "tokens": record.num_tokens,
        "seconds": round(end - record.arrived, 4),
        "ago": round(now - record.ended, 1) if record.ended else None,
        "first_token_ms": round((record.first_token_at - record.arrived) * 1e3, 1) if record.first_token_at else None,
    }
