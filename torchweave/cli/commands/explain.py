"""`torchweave explain MODEL`: what is effective and why, and what was built, drawn from the plan and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import Parser, engine_parser
from torchweave.cli.results import check_output_path, write_output
from torchweave.cli.session import engine
from torchweave.config import format_value

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Start an engine for MODEL and show the plan (asked, effective, why), the passes and what they matched, the pieces,
the CUDA graphs and the memory, the compile cache, and how long each stage of start-up took."""


def parser() -> Parser:
    cli_parser = engine_parser("explain", DESCRIPTION)
    cli_parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object; its schema is explain.schema.json in torchweave.compiler.explain",
    )
    cli_parser.add_argument(
        "--html", metavar="FILE", default="", help="write the report as one page, which needs no network"
    )
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    html = check_output_path("--html", args.html) if args.html else None
    if html is not None and not html.parent.is_dir():
        raise ValueError(f"--html {args.html}: there is no such folder")
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
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if console.width < 100 and not console.is_terminal:
        console = Console(highlight=False, width=160)
    _table(console, "Plan", ("option", "asked", "effective", "why"), [
        (row["name"], *row["shown"], row["why"]) for row in facts["plan"]
    ])  # fmt: skip
    if facts["model"] or facts["capture"]:
        _table(console, "Model", ("fact", ""), [
            (key, format_value(tuple(value) if isinstance(value, list) else value))
            for key, value in {**facts["model"], **{f"capture {k}": v for k, v in facts["capture"].items()}}.items()
        ])  # fmt: skip
    _table(console, "Quantization", ("fact", ""), _quantization_rows(facts["quantization"]))
    _table(console, "Passes", ("pass", "stage", "numerics", "matches", "operations", "us saved", "near misses"), [
        (row["name"], row["stage"], row["numerics"], str(row["matches"]), f"{row['ops_before']} -> {row['ops_after']}",
         _saved(row), f"{len(row['near_misses'])}" if row["near_misses"] else "-")
        if row["enabled"] else (row["name"], row["stage"] or "-", row["numerics"] or "-", "off", "-", "-", row["why"])
        for row in facts["passes"]
    ])  # fmt: skip
    _table(console, "Near misses", ("pass", "where: why"), [
        (row["name"], miss) for row in facts["passes"] for miss in row["near_misses"]
    ])  # fmt: skip
    shared = sum(row["shared_by"] for row in facts["pieces"])
    _table(console, f"Pieces: {len(facts['pieces'])} distinct of {shared}", ("piece", "ops", "used", "built by"), [
        (str(row["hash"])[:12], str(row["operations"]), f"{row['shared_by']}x", str(row["built"])) for row in facts["pieces"]
    ])  # fmt: skip
    _table(console, "Stage of rank 0", ("fact", ""), _stage_rows(facts["pipeline"]))
    _communication(console, facts["communication"])
    _table(
        console,
        "CUDA graphs",
        ("step", "kind", "sizes", "segments", "memory of the largest"),
        _graph_rows(facts["graphs"]),
    )
    _table(console, "Memory", ("use", "size"), [
        (key.replace("_", " "), _size(value) if _is_bytes(key) else str(value)) for key, value in facts["memory"].items()
    ])  # fmt: skip
    cache = facts["cache"]
    title = f"Compile cache: {cache['hits']} hits, {cache['misses']} misses"
    _table(console, title, ("entry", "key", "outcome", "why"), [
        (row["entry"], row["key"], row["outcome"], row.get("why", "")) for row in cache["entries"]
    ])  # fmt: skip
    _table(console, "Streams", ("piece", "split", "why"), [
        (row["piece"], "yes" if row["kept"] else "no", str(row.get("why", ""))) for row in facts["streams"]
    ])  # fmt: skip
    _table(console, "Fallbacks and warnings", ("what", "why"), [
        (row["what"], row["why"]) for row in facts["fallbacks"] + facts["warnings"]
    ])  # fmt: skip
    _table(console, "Start-up", ("stage", "seconds"), [
        (row["name"], f"{row['seconds']:.2f}") for row in facts["stages"]
    ])  # fmt: skip


def _communication(console: Console, communication: dict[str, Any]) -> None:
    _table(console, "Communication", ("piece", "used", "collective", "message at 1", _at_most(communication), "runs as"), [
        (row["piece"][:12], f"{row['used']}x", f"{each['calls']} {each['op']} over {each['group']}", _bytes(each["bytes"]),
         _bytes(each["at_most"]), _became(row["became"]))
        for row in communication["pieces"] for each in row["exchanges"]
    ])  # fmt: skip
    _table(console, "Fusions over ranks", ("pass", "matches", "us saved a call"), [
        (row["pass"], str(row["matches"]), _saved({"microseconds": row["measured"]}) if row["measured"] else "not measured")
        for row in communication["fusions"]
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


def _stage_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts:
        return []
    begin, end = facts["layers"]
    return [
        ("stage", f"{facts['stage'] + 1} of {facts['stages']}"),
        ("layers", f"{begin} to {end - 1}"),
        ("parameters", f"{facts['parameters']:,} of {facts['of']:,}"),
        ("handed over for each token", _bytes(facts["bytes_per_token"])),
    ]


def _quantization_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(key, format_value(value)) for key, value in facts.items() if key != "excluded"]
    return rows + [(f"not quantised: {why}", ", ".join(names)) for why, names in facts.get("excluded", {}).items()]


def _saved(row: dict[str, Any]) -> str:
    """What was measured, by token count: `T=1 4.1, T=8 0.3`."""
    best: dict[int, float] = {}
    for each in row["microseconds"]:
        best[each["tokens"]] = max(best.get(each["tokens"], 0.0), each["saved"])
    return ", ".join(f"T={tokens} {saved:.1f}" for tokens, saved in sorted(best.items())) or "-"


def _at_most(communication: dict[str, Any]) -> str:
    tokens = communication["max_num_tokens"]
    return "at the most" if tokens is None else f"at {tokens}"


def _bytes(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**10:.1f} KiB" if value < 2**20 else _size(value)


def _became(runs: Sequence[dict[str, Any]]) -> str:
    """Collectives as they were built: `T 1-64: 2 all_reduce_add_rms_norm`."""
    texts = []
    for run in runs:
        low, high = run["tokens"] or (None, None)
        tokens = "" if run["tokens"] is None else f"T {low}-{'' if high is None else high}: "
        texts.append(tokens + ", ".join(f"{count} {op.partition('::')[2]}" for op, count in run["ops"].items()))
    return "; ".join(texts) or "as it is"


def _graph_rows(graphs: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in graphs:
        groups.setdefault((event["step"], event["kind"]), []).append(event)
    return [
        (step, kind, format_value(tuple(sorted(event["key"] for event in events))), str(events[0]["segments"]),
         _size(max(event["bytes"] for event in events)))
        for (step, kind), events in groups.items()
    ]  # fmt: skip


def _is_bytes(key: str) -> bool:
    return not key.endswith(("_blocks", "_block_size", "_groups"))


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
