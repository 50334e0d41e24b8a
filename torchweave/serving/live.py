"""`/live`: everything that the page shows, as one JSON object that is made at most a few times a second.

The engine is never asked: what it said last is in the engine client and in what was watched of its traffic.
"""

from __future__ import annotations

from typing import Any

import msgspec

import torchweave
from torchweave.serving.counting import Distribution, percentile
from torchweave.serving.metrics import EngineNow
from torchweave.serving.service import Service
from torchweave.serving.traffic import HISTORY_SECONDS, Record

FRESH_SECONDS = 0.25
"""How old an answer may be: so often is it made at the most, however many pages are open."""


class Live:
    """The page's data for one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._made = float("-inf")
        self._text = b""
        self._compiled: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # an explanation, and what is shown of it

    def text(self) -> bytes:
        """The JSON text, not older than `FRESH_SECONDS`."""
        now = self._service.client.traffic.clock()
        if now - self._made >= FRESH_SECONDS:
            self._text, self._made = msgspec.json.encode(self.snapshot(now)), now
        return self._text

    def snapshot(self, now: float) -> dict[str, Any]:
        """What `docs/operations.md` describes; times in seconds, unless a name ends in `_ms`."""
        client = self._service.client
        traffic, counts = client.traffic, client.traffic.counts
        engine = EngineNow.of(client.stats)
        return {
            "state": "draining" if self._service.draining else self._state(),
            "failure": client.failure,
            "version": torchweave.__version__,
            "uptime": now - traffic.began,
            "model": self._model(),
            "startup": self._startup(),
            "requests": {
                "running": engine.running,
                "waiting": engine.waiting,
                "paused": engine.paused,
                "open": len(traffic.open),
                "ended": counts.reasons,
                "refused": counts.refused,
            },
            "blocks": {
                "total": engine.blocks,
                "used": engine.used,
                "tokens_per_block": engine.tokens_per_block,
                "hit_rate": engine.hits / engine.queries if engine.queries else None,
            },
            "steps": {"count": counts.iterations, **_spread(counts.iteration_seconds)},
            "first_token": _spread(counts.first_token),
            "inter_token": _spread(counts.inter_token),
            "tokens": {"read": counts.prompt_tokens, "generated": counts.generation_tokens},
            "history": self._history(now),
            "recent": [_shown(record, now) for record in traffic.shown()],
            "compiled": self._what_is_compiled(),
        }

    def _state(self) -> str:
        """`ready` only once requests are taken."""
        state = self._service.client.state
        return "starting" if state == "ready" and not self._service.ready else state

    def _model(self) -> dict[str, Any]:
        client = self._service.client
        card = client.model
        found: dict[str, Any] = {"name": self._service.names[0]}
        if card is not None:
            names = (
                "architecture",
                "dtype",
                "device",
                "quantization",
                "num_parameters",
                "max_model_len",
                "max_batch_size",
            )
            found |= {name: getattr(card, name) for name in names} | {"text": card.folder is not None}
        return found

    def _startup(self) -> dict[str, Any]:
        """Stages that are done with their seconds, and long work under way."""
        client = self._service.client
        stages = [event for event in client.events if event["event"] == "stage"]
        done = {event["name"] for event in stages}
        return {
            "stages": [{"name": event["name"], "seconds": event["seconds"]} for event in stages],
            "bars": [
                {name: bar[name] for name in ("title", "done", "total", "note")}
                for bar in client.progress
                if bar["title"] not in done
            ],
        }

    def _history(self, now: float) -> dict[str, Any]:
        history = self._service.client.traffic.history
        return {
            "seconds": HISTORY_SECONDS,
            **history.sums(now),
            "step_p50_ms": _milliseconds(history.percentiles(now, 50)),
            "step_p99_ms": _milliseconds(history.percentiles(now, 99)),
        }

    def _what_is_compiled(self) -> dict[str, Any]:
        explanation = self._service.client.explanation
        if self._compiled[0] is not explanation:
            self._compiled = explanation, _compiled(explanation)
        return self._compiled[1] | {"compiles_after_ready": self._service.client.traffic.counts.compiles_after_ready}


def _compiled(explanation: dict[str, Any]) -> dict[str, Any]:
    """Passes, pieces and graphs in use, in short."""
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


def _spread(values: Distribution) -> dict[str, float | None]:
    """Percentiles of the last values."""
    p50, p99 = percentile(values.recent, 50), percentile(values.recent, 99)
    return {"p50_ms": p50 and p50 * 1e3, "p99_ms": p99 and p99 * 1e3}


def _milliseconds(seconds: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value * 1e3, 3) for value in seconds]


def _shown(record: Record, now: float) -> dict[str, Any]:
    """A request as the page's list has it."""
    end = record.ended or now
    return {
        "id": record.id,
        "state": record.state,
        "prompt": record.num_prompt,
        "tokens": record.num_tokens,
        "seconds": round(end - record.arrived, 3),
        "ago": round(now - record.ended, 1) if record.ended else None,
        "first_token_ms": round((record.first - record.arrived) * 1e3, 1) if record.first else None,
    }
