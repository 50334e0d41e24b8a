"""Plan and report events as plain data, with every key of `explain.schema.json`; keys without events are empty."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from torchweave.config import Plan, format_value
from torchweave.report import Report
from torchweave.version import __version__

VERSION = 1
Facts = dict[str, Any]


def explain(plan: Plan | None, report: Report) -> Facts:
    """All decisions so far; see `explain.schema.json`. `plan` is None for a module without an engine."""
    choices = _choices(report)
    passes = _passes(report, choices)
    return {
        "version": VERSION,
        "torchweave": __version__,
        "model": _last_event(report, "model_loaded") | _last_event(report, "model_adapted"),
        "draft_model": _last_event(report, "draft_model"),
        "quantization": _last_event(report, "quantized"),
        "pipeline": _last_event(report, "pipeline_parallel"),
        "plan": [] if plan is None else [_entry(entry) for entry in plan.entries],
        "capture": _last_event(report, "capture"),
        "passes": passes,
        "choices": choices,
        "pieces": _events(report, "piece"),
        "parts": _last_event(report, "parts").get("order", []),
        "communication": _communication(report, passes, None if plan is None else plan.max_num_tokens),
        "streams": _events(report, "streams"),
        "graphs": _events(report, "graph"),
        "memory": _memory(report),
        "cache": _cache(report),
        "assumptions": _events(report, "assumption"),
        "fallbacks": _events(report, "fallback"),
        "warnings": _events(report, "warning"),
        "compiles_after_ready": len(report.select("compile_after_ready")),
        "stages": [
            {"name": event["name"], "start": max(0.0, event["at"] - event["seconds"]), "seconds": event["seconds"]}
            for event in report.select("stage")
        ],
    }


def as_json(facts: Facts) -> str:
    """The facts as the JSON text that the schema describes."""
    return json.dumps(facts, default=str, indent=1)


def schema() -> Facts:
    """The JSON schema of the facts."""
    return json.loads(files("torchweave.compiler.explain").joinpath("explain.schema.json").read_text(encoding="utf-8"))


def _entry(entry: Any) -> Facts:
    return {
        "name": entry.name,
        "asked": entry.requested,
        "effective": entry.effective,
        "why": entry.why,
        "shown": [format_value(entry.requested), format_value(entry.effective)],
    }


def _events(report: Report, kind: str) -> list[Facts]:
    return [_without_time(event) for event in report.select(kind)]


def _last_event(report: Report, kind: str) -> Facts:
    events = report.select(kind)
    return _without_time(events[-1]) if events else {}


def _without_time(event: Mapping[str, Any]) -> Facts:
    return {name: value for name, value in event.items() if name != "at"}


def _passes(report: Report, choices: Sequence[Facts]) -> list[Facts]:
    """One row per pass, in execution order, with counts of the model.

    A piece counts once per use, whatever the number of its variants: by the one in which the pass matches most.
    """
    rows: dict[str, Facts] = {}
    counted: dict[tuple[str, Any], Mapping[str, Any]] = {}  # by pass and piece
    for event in _events(report, "pass"):
        row = rows.setdefault(event["name"], _pass_row(event, choices))
        if not event["enabled"]:
            continue
        row["enabled"], row["why"] = True, ""
        variant = counted.setdefault((event["name"], event.get("piece", len(counted))), event)
        if event["matches"] > variant["matches"]:
            counted[event["name"], event["piece"]] = event
        row["seconds"] += 0.0 if event.get("cached") else event["seconds"]
        row["near_misses"] += [miss for miss in event["near_misses"] if miss not in row["near_misses"]]
        if "piece" in event:
            run = {name: event.get(name) for name in ("piece", "tokens", "matches", "rewritten", "shared_by")}
            row["runs"].append({**run, "collectives": _collective_changes(event.get("diff", {}))})
    for (name, _), event in counted.items():
        row, times = rows[name], event.get("shared_by", 1)
        for count in ("matches", "rewritten", "ops_before", "ops_after"):
            row[count] += times * event[count]
        for op, change in event.get("diff", {}).items():
            row["diff"][op] = row["diff"].get(op, 0) + times * change
    return list(rows.values())


def _pass_row(event: Mapping[str, Any], choices: Sequence[Facts]) -> Facts:
    keys = ("shape", "tokens", "choice", "microseconds", "baseline", "saved")
    return {
        "name": event["name"],
        "enabled": False,
        "why": event.get("why", ""),
        "stage": event.get("stage"),
        "numerics": event.get("numerics"),
        "matches": 0,
        "rewritten": 0,
        "near_misses": [],
        "seconds": 0.0,
        "ops_before": 0,
        "ops_after": 0,
        "diff": {},
        "runs": [],
        "microseconds": [{key: each[key] for key in keys} for each in choices if each["subject"] == event["name"]],
    }


def _choices(report: Report) -> list[Facts]:
    """Measured choices, from loaded tables and from tuning in this start."""
    rows: dict[tuple, Facts] = {}
    table_entries = [entry for event in report.select("table") for entry in event.get("entries", ())]
    for entry in [*table_entries, *_events(report, "tuned")]:
        row = {key: entry[key] for key in ("subject", "shape", "tokens", "choice", "microseconds", "baseline")}
        row["saved"] = round(entry["baseline"] - entry["microseconds"], 3) if entry["choice"] else 0.0
        rows[entry["subject"], entry["shape"], entry["tokens"]] = row
    return list(rows.values())


def _memory(report: Report) -> Facts:
    memory = _last_event(report, "memory")
    for kind in ("kv_cache", "kv_offload", "recurrent_states", "encoder_graphs"):
        facts = _last_event(report, kind).items()
        memory |= {
            f"{kind}_{key}": len(value) if isinstance(value, list) else value for key, value in facts if key != "dtype"
        }
    loaded, recorded = _last_event(report, "model_loaded"), _last_event(report, "graphs_recorded")
    if "bytes" in loaded:
        memory["weights"] = loaded["bytes"]
    if recorded:
        memory["graphs"] = recorded["bytes"]
    return memory


def _cache(report: Report) -> Facts:
    """Look-ups by outcome, and the key factors of each entry."""
    factors = {event["key"]: event["factors"] for event in report.select("cache_key")}
    entries = [{**event, "factors": factors.get(event["key"], {})} for event in _events(report, "cache")]
    count = {name: sum(entry["outcome"] == name for entry in entries) for name in ("hit", "miss", "stored")}
    return {"hits": count["hit"], "misses": count["miss"], "stored": count["stored"], "entries": entries}


def _communication(report: Report, passes: Sequence[Facts], max_num_tokens: int | None) -> Facts:
    """Collectives of each distinct piece, and the passes that changed them.

    Args:
        passes: rows of `_passes`.
        max_num_tokens: largest token count of a step; None if unknown.
    """
    pieces = [
        {
            "piece": event["piece"],
            "used": event["shared_by"],
            "exchanges": [{**each, "at_most": _bytes_at(each, max_num_tokens)} for each in event["exchanges"]],
            "became": _collectives_after_passes(event["piece"], event["exchanges"], passes),
        }
        for event in report.select("communication")
    ]
    return {"max_num_tokens": max_num_tokens, "pieces": pieces, "fusions": _fusions(passes) if pieces else []}


def _bytes_at(exchange: Facts, tokens: int | None) -> int | None:
    """Bytes of a message at a token count; None if unknown."""
    if exchange["per"] == "T":
        return None if tokens is None else tokens * exchange["bytes"]
    return exchange["bytes"] if not exchange["per"] else None


def _collectives_after_passes(piece: str, exchanges: Sequence[Facts], passes: Sequence[Facts]) -> list[Facts]:
    """Collectives of a built piece, by range of the token count."""
    ranges: dict[tuple, dict[str, int]] = {}
    for row in passes:
        for run in row["runs"]:
            if run["piece"] == piece:
                ranges.setdefault(tuple(run["tokens"] or ()), {})
    for tokens, ops in ranges.items():
        for exchange in exchanges:
            ops[exchange["op"]] = ops.get(exchange["op"], 0) + exchange["calls"]
        for row in passes:
            for run in row["runs"]:
                if run["piece"] == piece and tuple(run["tokens"] or ()) == tokens:
                    for op, change in run["collectives"].items():
                        ops[op] = ops.get(op, 0) + change
    return [
        {"tokens": list(tokens) or None, "ops": {op: count for op, count in sorted(ops.items()) if count}}
        for tokens, ops in ranges.items()
    ]


def _collective_changes(diff: Mapping[str, int]) -> dict[str, int]:
    """The changes of a pass that concern collectives, by op name."""
    words = ("all_reduce", "all_gather", "reduce_scatter")
    return {
        "::".join(name.split(".")[:2]): change for name, change in diff.items() if any(word in name for word in words)
    }


def _fusions(passes: Sequence[Facts]) -> list[Facts]:
    """The passes that changed collectives or their operands, each with its measured savings by token count."""
    keys = ("shape", "tokens", "microseconds", "baseline", "saved")
    return [
        {
            "pass": row["name"],
            "matches": row["matches"],
            "measured": [{key: each[key] for key in keys} for each in row["microseconds"]],
        }
        for row in passes
        if row["matches"] and (_collective_changes(row["diff"]) or row["name"].startswith("userbuffers_"))
    ]
