"""Benchmark results as JSON, with the data to reproduce them, and as Markdown tables."""

from __future__ import annotations

import itertools
import json
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torchweave
from torchweave.bench.serving.figures import rows as served
from torchweave.config import Plan

_PACKAGES = ("torch", "transformers", "triton", "numpy")
_KERNELS, _IDLE, _NAME = 20, 6, 70  # kernels, gaps and characters of names in a table; the JSON has all


def environment(device: str, num_ranks: int = 1) -> dict[str, Any]:
    """Environment of a measurement: commit, command, device, versions, date; each rank has its own GPU."""
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    is_gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if is_gpu else _cpu_name()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "command": shlex.join([*_program(Path(sys.argv[0]).resolve()), *sys.argv[1:]]),
        "device": f"{num_ranks} x {name}" if is_gpu and num_ranks > 1 else name,
        "num_threads": None if is_gpu else torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {"torchweave": torchweave.__version__, **versions},
    }


def header(scenario: str, model: str, dtype: str = "-", device: str = "cpu", num_ranks: int = 1) -> dict[str, Any]:
    """Fields of every result."""
    return {"scenario": scenario, "model": model, "dtype": dtype, "environment": environment(device, num_ranks)}


def engine_header(scenario: str, plan: Plan) -> dict[str, Any]:
    """Fields of every result of an engine, its effective options included."""
    fields = header(scenario, plan.config.model, plan.dtype, plan.device, plan.config.num_ranks)
    return fields | {"plan": {entry.name: entry.effective for entry in plan.entries}}


def _program(path: Path) -> list[str]:
    """The program of a command line: a file below `bench/`, or `torchweave`."""
    root = Path(torchweave.__file__).resolve().parents[1]
    return ["python", path.relative_to(root).as_posix()] if path.is_relative_to(root / "bench") else ["torchweave"]


def commit() -> str | None:
    """Commit of the running source, with `+` for modified files; None for an installed package."""
    folder = Path(torchweave.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", ".") else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(result: dict[str, Any], path: Path) -> None:
    """Write `result` as JSON to `path`, and as Markdown next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        f"# {result['model']} on {where['device']}",
        "",
        f"{where['date']}, commit {where['commit'] or 'unknown'}, {versions}, CUDA {where['cuda'] or 'none'}, "
        f"{result['dtype']}.",
        "",
        f"    {where['command']}",
        "",
    ]
    for heading, group in itertools.groupby(rows(result), key=lambda row: row[0]):
        lines += [f"## {heading}", "", "| measured | value | note |", "|---|---:|---|"]
        lines += [f"| {what} | {value} | {note} |" for _, what, value, note in group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(heading, what, value, note) of everything in a result, in the order in which it is shown."""
    if result["scenario"] == "serve":
        return served(result)
    summary_rows: list[tuple[str, str, str, str]] = []
    for row in result.get("decode", ()):
        what = f"batch {row['batch_size']}, {row['input_len']} in, {row['output_len']} out"
        note = ""
        if "floor_fraction" in row:
            note = f"memory floor {row['floor_ms']:.2f} ms, reached {row['floor_fraction']:.0%}"
        summary_rows.append(("Decode", what, _cell(row, "median_tpot_ms", "{:.2f} ms/token"), note or _skipped(row)))
    for row in result.get("first_token", ()):
        value = _cell(row, "median_ttft_ms", "{:.1f} ms")
        note = f"p99 {row['p99_ttft_ms']:.1f} ms" if "p99_ttft_ms" in row else _skipped(row)
        summary_rows.append(("Time to first token", f"prompt of {row['input_len']}", value, note))
    for row in result.get("prefill", ()):
        what, value = f"{row['num_requests']} x {row['input_len']}", _cell(row, "input_throughput", "{:,.0f} tokens/s")
        summary_rows.append(("Prefill", what, value, _skipped(row)))
    if "mixed" in result:
        row = result["mixed"]
        note = (
            f"{row['elapsed_time']:.1f} s, {row['total_output_tokens']:,} tokens out" if "elapsed_time" in row else ""
        )
        what = f"{row['num_requests']} mixed requests"
        value = _cell(row, "output_throughput", "{:,.0f} output tokens/s")
        summary_rows.append(("Throughput", what, value, note or _skipped(row)))
    for row in result.get("compare", ()):
        note = f"torchweave is {row['ratio']:.2f}x as fast" if row["ratio"] != 1 else ""
        summary_rows.append(("In one run", row["name"], f"{row['output_throughput']:,.0f} output tokens/s", note))
    for kind in ("cold", "warm"):
        if kind in result.get("startup", {}):
            row = result["startup"][kind]
            parts = ", ".join(
                f"{part['name']} {part['seconds']:.1f}" for part in row["stages"] if part["seconds"] >= 0.05
            )
            if without := row.get("modules_without_bytecode"):
                parts += f"; {without:,} modules were imported without bytecode"
            summary_rows.append(("Start-up to the first token", kind, f"{row['seconds']:.1f} s", parts))
    for row in result.get("steps", ()):
        summary_rows += _profile_rows(row)
    if "host" in result:
        row = result["host"]
        parts = ", ".join(f"{part} {row[part + '_us']:.0f}" for part in ("schedule", "launch", "update"))
        what = f"{row['num_requests']} running requests"
        summary_rows.append(
            ("Host time a decode step", what, f"{row['host_us']:.0f} us", f"{parts}, p99 {row['host_p99_us']:.0f}")
        )
    return summary_rows


def _profile_rows(row: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of a step of `bench profile` and its longest kernels."""
    heading, shown, rest = f"A {row['kind']} step", row["kernels"][:_KERNELS], row["kernels"][_KERNELS:]
    what = f"{row['rows']:g} rows, {row['tokens']:g} tokens, {' or '.join(row['how'])}"
    profiled_ms = sum(kernel["us"] for kernel in row["kernels"]) / 1e3
    note = f"GPU busy for {row['busy_ms']:.3f} ms" if "busy_ms" in row else f"{profiled_ms:.3f} ms in ops of torch"
    summary_rows = [(heading, what, f"{row['ms']:.3f} ms", note)]
    for kernel in shown:
        summary_rows.append(
            (heading, f"`{kernel['name'][:_NAME]}`", f"{kernel['us']:.1f} us", f"{kernel['launches']:g} a step")
        )
    if rest:
        launches = f"{sum(each['launches'] for each in rest):g} a step"
        summary_rows.append((heading, f"{len(rest)} others", f"{sum(each['us'] for each in rest):.1f} us", launches))
    for gap in row.get("idle", ())[:_IDLE]:
        what = f"idle before `{gap['name'][:_NAME]}`"
        summary_rows.append((heading, what, f"{gap['us']:.1f} us", f"{gap['launches']:g} a step"))
    return summary_rows


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    return form.format(row[key]) if key in row else "-"


def _skipped(row: dict[str, Any]) -> str:
    return f"skipped: {row['skipped']}" if "skipped" in row else ""


def text(result: dict[str, Any]) -> str:
    """The rows as aligned text."""
    table = rows(result)
    widths = [max((len(row[column]) for row in table), default=0) for column in range(3)]
    return "\n".join(
        f"{row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2].rjust(widths[2])}  {row[3]}".rstrip()
        for row in table
    )
