"""`torchweave explain MODEL`: what is effective and why, and what was built, drawn from the plan and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import engine_parser
from torchweave.cli.session import engine
from torchweave.log import Report
from torchweave.plan import Plan, show

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Start an engine for MODEL and show the plan (asked, effective, why), the passes and what they matched, the pieces,
the CUDA graphs and the memory, and how long each stage of start-up took."""


def run(argv: Sequence[str]) -> int:
    parser = engine_parser("explain", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    args = parser.read(argv)
    with engine(args) as llm:
        facts = explain(llm.plan, llm.report)
    if args.json:
        print(json.dumps(facts, default=str))
    else:
        _print(facts)
    return 0


def explain(plan: Plan, report: Report) -> dict[str, Any]:
    """Everything that is shown, as plain data.

    Keys: `plan` (name, asked, effective, why), `model`, `capture`, `passes`, `pieces`, `graphs`, `memory`, `fallbacks`,
    `stages` (name, seconds). What did not happen is empty.
    """
    graphs = [_without(event, "at") for event in report.select("graph")]
    recorded = report.select("graphs_recorded")
    memory = {
        **_last(report, "memory"),
        **{f"kv_cache_{key}": value for key, value in _last(report, "kv_cache").items()},
    }
    if recorded:
        memory["graphs"] = recorded[-1]["bytes"]
    return {
        "plan": [
            {"name": entry.name, "asked": entry.asked, "effective": entry.effective, "why": entry.why}
            for entry in plan.entries
        ],
        "model": _last(report, "model_loaded") | _last(report, "model_adapted"),
        "capture": _last(report, "capture"),
        "passes": [_without(event, "at") for event in report.select("pass")],
        "pieces": [_without(event, "at") for event in report.select("piece")],
        "graphs": graphs,
        "memory": memory,
        "fallbacks": [_without(event, "at") for event in report.select("fallback")],
        "stages": [{"name": event["name"], "seconds": event["seconds"]} for event in report.select("stage")],
    }


def _last(report: Report, kind: str) -> dict[str, Any]:
    events = report.select(kind)
    return _without(events[-1], "at") if events else {}


def _without(event: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != key}


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if console.width < 100 and not console.is_terminal:
        console = Console(highlight=False, width=160)
    _table(console, "Plan", ("option", "asked", "effective", "why"), [
        (row["name"], show(row["asked"]), show(row["effective"]), row["why"]) for row in facts["plan"]
    ])  # fmt: skip
    if facts["model"] or facts["capture"]:
        _table(console, "Model", ("fact", ""), [
            (key, show(tuple(value) if isinstance(value, list) else value))
            for key, value in {**facts["model"], **{f"capture {k}": v for k, v in facts["capture"].items()}}.items()
        ])  # fmt: skip
    _table(console, "Passes", ("pass", "stage", "numerics", "matches", "rewritten", "near misses"), [
        (row["name"], row["stage"], row["numerics"], str(row["matches"]), str(row["rewritten"]), _misses(row))
        if row["enabled"] else (row["name"], "-", "-", "off", "-", "-") for row in facts["passes"]
    ])  # fmt: skip
    shared = sum(row["shared_by"] for row in facts["pieces"])
    _table(console, f"Pieces: {len(facts['pieces'])} distinct of {shared}", ("piece", "ops", "used", "built by"), [
        (str(row["hash"])[:12], str(row["operations"]), f"{row['shared_by']}x", str(row["built"])) for row in facts["pieces"]
    ])  # fmt: skip
    _table(
        console,
        "CUDA graphs",
        ("step", "kind", "sizes", "segments", "memory of the largest"),
        _graph_rows(facts["graphs"]),
    )
    _table(console, "Memory", ("use", "size"), [
        (key.replace("_", " "), _size(value) if _is_bytes(key) else str(value)) for key, value in facts["memory"].items()
    ])  # fmt: skip
    _table(console, "Fallbacks", ("what", "why"), [(row["what"], row["why"]) for row in facts["fallbacks"]])
    _table(console, "Start-up", ("stage", "seconds"), [
        (row["name"], f"{row['seconds']:.2f}") for row in facts["stages"]
    ])  # fmt: skip


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _misses(row: dict[str, Any]) -> str:
    misses = row["near_misses"]
    return f"{len(misses)}: {misses[0]}" if misses else "-"


def _graph_rows(graphs: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in graphs:
        groups.setdefault((event["step"], event["kind"]), []).append(event)
    return [
        (step, kind, show(tuple(sorted(event["key"] for event in events))), str(events[0]["segments"]),
         _size(max(event["bytes"] for event in events)))
        for (step, kind), events in groups.items()
    ]  # fmt: skip


def _is_bytes(key: str) -> bool:
    return key not in ("kv_cache_blocks", "kv_cache_block_size")


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
