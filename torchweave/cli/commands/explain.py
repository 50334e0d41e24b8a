"""`torchweave explain MODEL`: effective options with reasons, passes, pieces, CUDA graphs, memory and start-up times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweave.cli.arguments import Parser, engine_parser
from torchweave.cli.output import check_output_file, print_table, terminal_width, write_output
from torchweave.cli.session import engine
from torchweave.config import format_value

DESCRIPTION = """Start an engine for MODEL and show the plan (asked, effective, why), passes with matches, pieces, CUDA graphs,
memory, the compile cache, and the duration of each start-up stage."""
_WIDE = 110  # terminal columns from which the plan has a column for requested values
_UNITS = {
    "max_model_len": "tokens",
    "block_size": "tokens",
    "cpu_kv_cache_gib": "GiB",
    "kv_offload_gb": "GiB",
    "rank_timeout": "s",
    "kv_cache_block_size": "tokens",
}


def parser() -> Parser:
    cli_parser = engine_parser("explain", DESCRIPTION)
    cli_parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object; its schema is explain.schema.json in torchweave.compiler.explain",
    )
    cli_parser.add_argument("--html", metavar="FILE", default="", help="write a self-contained HTML report to FILE")
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    html = check_output_file("--html", args.html)
    with engine(args) as llm:
        from torchweave.compiler.explain.facts import as_json, explain
        from torchweave.compiler.explain.page import page

        facts = explain(llm.plan, llm.report)
    if html is not None:
        write_output("--html", html, page(facts))
    if args.json:
        print(as_json(facts))
    elif not args.html:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    _print_plan(facts["plan"])
    capture = {f"capture {key}": value for key, value in facts["capture"].items()}
    print_table(
        "Model", ("fact", "value"), [(key, _figure(key, value)) for key, value in {**facts["model"], **capture}.items()]
    )
    draft_model = facts["draft_model"].items()
    print_table("Draft model", ("fact", "value"), [(key, _figure(key, value)) for key, value in draft_model])
    print_table("Quantization", ("fact", "value"), _quantization_rows(facts["quantization"]))
    print_table("Passes", ("pass", "stage", "numerics", "matches", "operations", "us saved", "near misses"), [
        (row["name"], row["stage"], row["numerics"], str(row["matches"]), f"{row['ops_before']} -> {row['ops_after']}",
         _saved(row), str(len(row["near_misses"])))
        for row in facts["passes"] if row["enabled"]
    ], right=("matches", "operations", "near misses"))  # fmt: skip
    print_table("Disabled passes", ("pass", "reason"), [
        (row["name"], row["why"]) for row in facts["passes"] if not row["enabled"]
    ])  # fmt: skip
    print_table("Near misses", ("pass", "location: reason"), [
        (row["name"], miss) for row in facts["passes"] for miss in row["near_misses"]
    ])  # fmt: skip
    shared = sum(row["shared_by"] for row in facts["pieces"])
    print_table(f"Pieces: {len(facts['pieces'])} distinct of {shared}", ("piece", "ops", "used", "built by"), [
        (str(row["hash"])[:12], str(row["operations"]), f"{row['shared_by']}x", str(row["built"])) for row in facts["pieces"]
    ], right=("ops", "used"))  # fmt: skip
    print_table("Pipeline stage of rank 0", ("fact", "value"), _stage_rows(facts["pipeline"]))
    _print_communication(facts["communication"])
    print_table(
        "CUDA graphs", ("step", "kind", "sizes", "segments", "memory of the largest"), _graph_rows(facts["graphs"])
    )
    print_table("Memory", ("use", "size"), [
        (key.replace("_", " "), _size(value) if _is_bytes(key) else _figure(key, value))
        for key, value in facts["memory"].items()
    ], right=("size",))  # fmt: skip
    cache = facts["cache"]
    title = f"Compile cache: {cache['hits']} hits, {cache['misses']} misses"
    print_table(title, ("entry", "key", "outcome", "why"), [
        (row["entry"], row["key"], row["outcome"], row.get("why", "")) for row in cache["entries"]
    ])  # fmt: skip
    print_table("Streams", ("piece", "split", "why"), [
        (row["piece"], "yes" if row["kept"] else "no", str(row.get("why", ""))) for row in facts["streams"]
    ])  # fmt: skip
    print_table("Fallbacks and warnings", ("what", "why"), [
        (row["what"], row["why"]) for row in facts["fallbacks"] + facts["warnings"]
    ])  # fmt: skip
    print_table("Start-up", ("stage", "duration"), [
        (row["name"], _duration(row["seconds"])) for row in facts["stages"]
    ], right=("duration",))  # fmt: skip


def _print_plan(entries: Sequence[dict[str, Any]]) -> None:
    """Options by config, so that names stay short; a narrow terminal shows requested values in the last column."""
    wide = terminal_width() >= _WIDE
    columns = ("option", "asked", "effective", "why") if wide else ("option", "effective", "why")
    sections: dict[str, list[tuple[str, ...]]] = {}
    for entry in entries:
        section, _, name = entry["name"].rpartition(".")
        unit = f" {_UNITS[name]}" if name in _UNITS else ""
        asked, effective = (
            text + unit if unit and text.replace(".", "").isdigit() else text for text in entry["shown"]
        )
        why = entry["why"] if wide or asked in (effective, "-") else f"asked {asked}: {entry['why']}"
        sections.setdefault(section, []).append((name, asked, effective, why) if wide else (name, effective, why))
    for section, rows in sections.items():
        print_table(f"Plan: {section}" if section else "Plan", columns, rows)


def _print_communication(communication: dict[str, Any]) -> None:
    tokens = communication["max_num_tokens"]
    largest = "largest message" if tokens is None else f"message at {tokens}"
    print_table("Communication", ("piece", "used", "collective", "message at 1", largest, "runs as"), [
        (row["piece"][:12], f"{row['used']}x", f"{each['calls']} {each['op']} over {each['group']}", _bytes(each["bytes"]),
         _bytes(each["at_most"]), _collectives(row["became"]))
        for row in communication["pieces"] for each in row["exchanges"]
    ])  # fmt: skip
    print_table("Fusions over ranks", ("pass", "matches", "us saved per call"), [
        (row["pass"], str(row["matches"]), _saved({"microseconds": row["measured"]}) if row["measured"] else "not measured")
        for row in communication["fusions"]
    ])  # fmt: skip


def _stage_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts:
        return []
    begin, end = facts["layers"]
    return [
        ("stage", f"{facts['stage'] + 1} of {facts['stages']}"),
        ("layers", f"{begin} to {end - 1}"),
        ("parameters", f"{_count(facts['parameters'])} of {_count(facts['of'])}"),
        ("sent per token", _bytes(facts["bytes_per_token"])),
    ]


def _quantization_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(key, format_value(value)) for key, value in facts.items() if key != "excluded"]
    return rows + [(f"not quantized: {why}", ", ".join(names)) for why, names in facts.get("excluded", {}).items()]


def _saved(row: dict[str, Any]) -> str:
    """Measured gains by token count: `T=1 4.1, T=8 0.3`."""
    best: dict[int, float] = {}
    for each in row["microseconds"]:
        best[each["tokens"]] = max(best.get(each["tokens"], 0.0), each["saved"])
    return ", ".join(f"T={tokens} {saved:.1f}" for tokens, saved in sorted(best.items())) or "-"


def _collectives(runs: Sequence[dict[str, Any]]) -> str:
    """Collectives after fusion: `T 1-64: 2 all_reduce_add_rms_norm`."""
    texts = []
    for run in runs:
        low, high = run["tokens"] or (None, None)
        tokens = "" if run["tokens"] is None else f"T {low}-{'' if high is None else high}: "
        texts.append(tokens + ", ".join(f"{count} {op.partition('::')[2]}" for op, count in run["ops"].items()))
    return "; ".join(texts) or "unchanged"


def _graph_rows(graphs: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in graphs:
        groups.setdefault((event["step"], event["kind"]), []).append(event)
    return [
        (step, kind, format_value(tuple(sorted(event["key"] for event in events))), str(events[0]["segments"]),
         _size(max(event["bytes"] for event in events)))
        for (step, kind), events in groups.items()
    ]  # fmt: skip


def _figure(key: str, value: Any) -> str:
    """A fact, rounded and with its unit."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure('', each)}" for name, each in value.items()) or "none"
    if key in _UNITS:
        return f"{value} {_UNITS[key]}"
    if key == "bytes":
        return _size(value)
    if key.endswith("seconds"):
        return _duration(value)
    if key == "parameters":
        return _count(value)
    return (
        f"{value:.4g}" if isinstance(value, float) else format_value(tuple(value) if isinstance(value, list) else value)
    )


def _count(value: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _is_bytes(key: str) -> bool:
    return not key.endswith(("_blocks", "_block_size", "_groups"))


def _bytes(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**10:.1f} KiB" if value < 2**20 else _size(value)


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
