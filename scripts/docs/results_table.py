"""Write the tables of measurements.

README.md has six models beside the peer, from the newest `bench/results/peers-*.json`; bench/README.md has the newest results of
bench/results/*.json per model, weights and device.

python scripts/docs/results_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PEERS_BEGIN, PEERS_END = "<!-- peers: begin -->", "<!-- peers: end -->"
PEER_ROWS = (
    "Llama 1B, bfloat16",
    "Llama 8B, bfloat16",
    "Llama 8B, 4 bits (g128)",
    "Qwen3 8B, FP8 blocks",
    "Qwen3 30B-A3B, bfloat16",
    "Llama 70B, bfloat16, TP 4",
)
"""Models of the README's table, as a result of a peer names them."""
NONE_YET = "No results are committed yet."


def table(results: list[tuple[str, dict[str, Any]]]) -> str:
    """A Markdown table with a row per result (path from bench/, content)."""
    if not results:
        return NONE_YET
    lines = ["| model, device | decode ms/token | to first token ms | prefill tokens/s | mixed, output tokens/s | |"]
    lines.append("|---|---|---|---|---|---|")
    for path, result in results:
        decode = _cells(result.get("decode", ()), "batch_size", "median_tpot_ms", "{:.2f}")
        first = _cells(result.get("first_token", ()), "input_len", "median_ttft_ms", "{:.1f}")
        prefill = ", ".join(
            f"{row['num_requests']}x{row['input_len']}: {row['input_throughput']:,.0f}"
            for row in result.get("prefill", ())
            if "input_throughput" in row
        )
        mixed = result.get("mixed", {}).get("output_throughput")
        attention = result.get("plan", {}).get("attention_backend")
        weights = result.get("plan", {}).get("quantization") or result["dtype"]
        what = f"{result['model']} {weights}, {result['environment']['device']}"
        what += f", {attention} attention" if attention else ""
        lines.append(
            f"| {what} | {decode} | {first} | {prefill or '-'} | {f'{mixed:,.0f}' if mixed else '-'} | [run]({path}) |"
        )
    return "\n".join(lines)


def _cells(rows: Any, key: str, value: str, form: str) -> str:
    return ", ".join(f"{row[key]}: {form.format(row[value])}" for row in rows if value in row) or "-"


def read(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The newest result of `torchweave bench latency|throughput|suite` per model, weights and device in a folder."""
    newest: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or result.get("scenario") not in ("latency", "throughput", "suite"):
            continue
        environment = result["environment"]
        key = result["model"], result["dtype"], result.get("plan", {}).get("quantization") or "", environment["device"]
        if key not in newest or environment["date"] > newest[key][1]["environment"]["date"]:
            newest[key] = path.with_suffix(".md").relative_to(ROOT / "bench").as_posix(), result
    return [newest[key] for key in sorted(newest)]


def peers(folder: Path) -> str:
    """The table beside the peer: this engine's figure, a slash, the peer's."""
    results = {path: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("peers-*.json")}
    path = max(results, key=lambda path: results[path]["date"])
    result = results[path]
    rows = {row["model"]: row for row in result["rows"]}
    lines = [
        f"This engine / {result['peer']}, both on {result['device']}s of one host, commit {result['commit']}, "
        f"{result['date']} ([all figures]({path.with_suffix('.md').relative_to(ROOT).as_posix()})):",
        "",
        "| | decode ms/token, batch 1 | batch 32 | first of 1,000 tokens, ms | prompt tokens/s | mixed, output tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for name in PEER_ROWS:
        row = rows[name]
        figures = (
            row["decode_ms"].get("1"),
            row["decode_ms"].get("32"),
            row["first_token_ms"].get("1000"),
            row["prefill_tokens_per_s"].get("16x1024"),
            row["mixed_tokens_per_s"],
        )
        lines.append(f"| {name} | " + " | ".join(_beside(pair) for pair in figures) + " |")
    return "\n".join(lines)


def _beside(pair: list[float] | None) -> str:
    return f"{pair[0]:,} / {pair[1]:,}" if pair else "-"


def replaced(page: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """`page` with `content` between the markers."""
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def pages() -> dict[Path, str]:
    """The pages with new tables."""
    folder = ROOT / "bench" / "results"
    readme, results = ROOT / "README.md", ROOT / "bench" / "README.md"
    return {
        readme: replaced(readme.read_text(encoding="utf-8"), peers(folder), PEERS_BEGIN, PEERS_END),
        results: replaced(results.read_text(encoding="utf-8"), table(read(folder))),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
