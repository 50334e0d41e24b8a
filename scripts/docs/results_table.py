"""Write the newest results of bench/results/*.json per model, weights and device into the table of README.md.

python scripts/docs/results_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NONE_YET = "No results are committed yet."


def table(results: list[tuple[str, dict[str, Any]]]) -> str:
    """A Markdown table with a row per result (path from the root, content)."""
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
            newest[key] = path.with_suffix(".md").relative_to(ROOT).as_posix(), result
    return [newest[key] for key in sorted(newest)]


def replaced(page: str, content: str) -> str:
    """`page` with `content` between the markers."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(
        replaced(readme.read_text(encoding="utf-8"), table(read(ROOT / "bench" / "results"))), encoding="utf-8"
    )
    print(f"wrote {readme}")


if __name__ == "__main__":
    main()
