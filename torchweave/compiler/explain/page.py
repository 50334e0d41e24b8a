"""The report as a single HTML file without external scripts, with a light and a dark theme and a layout for phones.

This module computes positions and sizes as percentages; the template places them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from torchweave.compiler.explain.facts import Facts, as_json, explain
from torchweave.config import Plan
from torchweave.report import Report

_COLOURS = 8  # number of piece colors in the template; more pieces repeat them
_MEMORY = ("weights", "activations", "graphs", "encoder_graphs_bytes", "recurrent_states_bytes", "kv_cache_bytes")


def save_explanation(plan: Plan | None, report: Report) -> None:
    """Write the decisions so far as artifacts `explain.json` and `report.html`."""
    report.artifact("explain.json", lambda: as_json(explain(plan, report)))
    report.artifact("report.html", lambda: page(explain(plan, report)))


def page(facts: Facts) -> str:
    """The HTML page of these facts."""
    from jinja2 import Environment, StrictUndefined

    text = files("torchweave.compiler.explain").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"size": size_text, "seconds": seconds_text, "count": count_text}
    colours = {piece["hash"]: index % _COLOURS for index, piece in enumerate(facts["pieces"])}
    return environment.from_string(text).render(
        facts=facts,
        title=facts["model"].get("name", "a module"),
        figures=_figures(facts),
        plan=_plan(facts["plan"]),
        timeline=_timeline(facts["stages"]),
        colours=colours,
        runs=_runs(facts["parts"], {piece["hash"]: piece for piece in facts["pieces"]}),
        passes=[_pass(row) for row in facts["passes"]],
        streams=[_timeline_rows(each) for each in facts["streams"]],
        graphs=_graphs(facts["graphs"]),
        memory=_memory(facts["memory"]),
        cache=_cache(facts["cache"]["entries"]),
    )


def size_text(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}" if unit == "GiB" else f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def count_text(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:,.0f}"


def _figures(facts: Facts) -> list[tuple[str, str]]:
    """The key figures at the top of the page: (figure, label)."""
    uses = sum(piece["shared_by"] for piece in facts["pieces"])
    figures = []
    if facts["model"].get("parameters"):
        figures.append((count_text(facts["model"]["parameters"]), "parameters"))
    if facts["capture"]:
        figures.append((count_text(facts["capture"]["operations"]), "operations captured"))
    if facts["pieces"]:
        figures.append((f"{len(facts['pieces'])} of {uses}", "distinct pieces"))
    figures.append((count_text(sum(row["matches"] for row in facts["passes"])), "matches of passes"))
    if facts["graphs"]:
        figures.append((str(len(facts["graphs"])), "CUDA graphs"))
    if facts["stages"]:
        figures.append((seconds_text(max(each["start"] + each["seconds"] for each in facts["stages"])), "to be ready"))
    cache = facts["cache"]
    if cache["hits"] or cache["misses"]:
        figures.append((f"{cache['hits']} / {cache['misses']}", "cache hits / misses"))
    return figures


def _plan(entries: Sequence[Facts]) -> list[Facts]:
    """Options, with marks for those that the user set and those whose effective value differs from the request."""
    return [
        {
            **entry,
            "group": entry["name"].rpartition(".")[0],
            "leaf": entry["name"].rpartition(".")[2],
            "changed": entry["why"] not in ("default", "as asked"),
            "asked_for": entry["why"] == "as asked",
        }
        for entry in entries
    ]


def _timeline(stages: Sequence[Facts]) -> Facts:
    """Stages by start time; offset and width are percentages of the total time."""
    end = max((each["start"] + each["seconds"] for each in stages), default=0.0) or 1.0
    rows = sorted(stages, key=lambda each: (each["start"], -each["seconds"]))
    bars: list[Facts] = []
    open_until: list[float] = []
    for each in rows:
        open_until = [until for until in open_until if until > each["start"] + 1e-4]
        left, width = 100 * each["start"] / end, max(0.4, 100 * each["seconds"] / end)
        bars.append(
            {**each, "left": min(left, 99.6), "width": min(width, 100 - min(left, 99.6)), "depth": len(open_until)}
        )
        open_until.append(each["start"] + each["seconds"])
    return {"end": end, "bars": bars, "ticks": [end * share / 4 for share in range(5)]}


def _runs(parts: Sequence[Facts], pieces: dict[str, Facts]) -> list[Facts]:
    """The parts in order, with repetitions folded: each entry is a list of parts and its number of consecutive runs."""
    names = [part.get("piece") or part["boundary"] for part in parts]
    folded: list[Facts] = []
    at = 0
    while at < len(names):
        length, times = _repeat(names, at)
        block = [
            {"name": name, "is_piece": "piece" in part, "operations": pieces.get(name, {}).get("operations", 0)}
            for name, part in zip(names[at : at + length], parts[at : at + length], strict=True)
        ]
        folded.append({"parts": block, "times": times})
        at += length * times
    return folded


def _repeat(names: Sequence[str], at: int) -> tuple[int, int]:
    """(length, times) of the repetition from `at` that covers the most parts; the shortest on ties."""
    best = (1, 1)
    for length in range(1, min(12, (len(names) - at) // 2) + 1):
        times = 1
        while names[at + times * length : at + (times + 1) * length] == names[at : at + length]:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _pass(row: Facts) -> Facts:
    """A pass with its changes sorted, removals first, and the measurement with the largest saving."""
    best = max(row["microseconds"], key=lambda each: each["saved"], default=None)
    return {
        **row,
        "diff": sorted(row["diff"].items(), key=lambda item: item[1]),
        "best": best if best is not None and best["saved"] > 0 else None,
    }


def _timeline_rows(event: Facts) -> Facts:
    """A stream timeline; spans are percentages of the serial time, so that the saving is visible."""
    whole = (
        max([event.get("serial", 0.0), event.get("makespan", 0.0), *(span["end"] for span in event["lanes"])]) or 1.0
    )
    rows: dict[int, list[Facts]] = {}
    for span in event["lanes"]:
        left, width = 100 * span["start"] / whole, max(0.3, 100 * (span["end"] - span["start"]) / whole)
        nodes = span["nodes"]
        label = nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}" if nodes else ""
        rows.setdefault(span["stream"], []).append(
            {"left": left, "width": width, "label": label, "title": ", ".join(nodes)}
        )
    return {
        **event,
        "rows": sorted(rows.items()),
        "makespan_share": 100 * event.get("makespan", whole) / whole,
        "saved": 1 - event["makespan"] / event["serial"] if event.get("serial") else 0.0,
    }


def _graphs(graphs: Sequence[Facts]) -> list[Facts]:
    """Recordings by kind of step; the size of each bucket is a percentage of the largest."""
    largest = max((graph["bytes"] for graph in graphs), default=0) or 1
    kinds: dict[tuple[str, str], list[Facts]] = {}
    for graph in sorted(graphs, key=lambda graph: graph["key"]):
        kinds.setdefault((graph["step"], graph["kind"]), []).append({**graph, "share": 100 * graph["bytes"] / largest})
    return [
        {"step": step, "kind": kind, "buckets": buckets, "bytes": sum(each["bytes"] for each in buckets)}
        for (step, kind), buckets in kinds.items()
    ]


def _memory(memory: Facts) -> Facts:
    """Memory uses as percentages of the total, or of their sum if the total is unknown."""
    parts = [(name.removesuffix("_bytes").replace("_", " "), memory[name]) for name in _MEMORY if memory.get(name)]
    total = memory.get("total") or sum(size for _, size in parts) or 1
    bars = [{"name": name, "bytes": size, "share": 100 * size / total} for name, size in parts]
    return {"total": memory.get("total"), "bars": bars}


def _cache(entries: Iterable[Facts]) -> list[Facts]:
    """One row per entry; a miss and its store share a row."""
    rows: dict[str, Facts] = {}
    for entry in entries:
        row = rows.setdefault(entry["key"], {"outcome": "", "why": "", **entry})
        if entry["outcome"] == "stored" and row["outcome"] == "miss":
            row["why"] = (row["why"] + ", " if row["why"] else "") + "stored"
        row["bytes"] = entry.get("bytes", row.get("bytes"))
    return [
        {**row, "factors": [(name, _short(value)) for name, value in sorted(row["factors"].items())]}
        for row in rows.values()
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."
