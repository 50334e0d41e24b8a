"""Draw docs/images/architecture.svg from the code.

Stations of a request are listed here by file and symbol, described by the first paragraph of a docstring; the rooms below show the
imports of the files. A station that does not exist in the code is an error, which a test detects.

    python scripts/docs/draw_architecture.py [--output docs/images/architecture.svg]
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchweave"
ROOMS = ("cli", "serving", "engine", "models", "compiler", "distributed", "ops", "config", "report")


@dataclass(frozen=True)
class Station:
    """A station of the data flow: `symbol` of `file`, below torchweave/.

    A method is described by its own docstring, a class or function by that of its file.
    """

    file: str
    symbol: str


START = (
    Station("config/resolve.py", "resolve"),
    Station("models/load.py", "load"),
    Station("models/adapt.py", "adapt"),
    Station("compiler/capture/capture.py", "capture"),
    Station("compiler/passes/manager.py", "PassManager"),
    Station("compiler/partition/split.py", "split"),
    Station("compiler/codegen/pieces.py", "build_inductor"),
    Station("compiler/runtime/compiled_graph.py", "CompiledGraph"),
    Station("engine/runner/memory.py", "blocks_that_fit"),
    Station("engine/runner/recordings.py", "Recordings.record_all"),
    Station("compiler/runtime/cuda_graphs.py", "record"),
)
STEP = (
    Station("engine/llm.py", "LLM.generate"),
    Station("engine/client.py", "Client"),
    Station("engine/batch_manager.py", "BatchManager"),
    Station("engine/scheduler/scheduler.py", "Scheduler"),
    Station("engine/runner/model_runner.py", "ModelRunner.launch"),
    Station("ops/slot_state.py", "SlotState"),
    Station("compiler/runtime/cuda_graphs.py", "Recording.replay"),
    Station("ops/attention/op.py", "run_attention"),
    Station("ops/sampling/sample.py", "sample"),
    Station("engine/runner/model_runner.py", "ModelRunner.collect"),
    Station("engine/detokenizer.py", "CompletionBuilder"),
)

WIDTH, MARGIN, BOX, GAP = 1180, 24, 76, 22
LANE = (WIDTH - 3 * MARGIN) // 2
BLUE, GREEN, INK, PALE, GREY = "#2f6fab", "#2a8a5f", "#1b2733", "#f6f8fa", "#66707a"


def paragraph(station: Station) -> str:
    """The description of a station: the first paragraph of a docstring.

    Raises:
        LookupError: the file, the symbol or its docstring does not exist.
    """
    path = PACKAGE / station.file
    if not path.is_file():
        raise LookupError(f"there is no torchweave/{station.file}")
    module = ast.parse(path.read_text(encoding="utf-8"))
    node: ast.AST = module
    for name in station.symbol.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [child for child in getattr(node, "body", ()) if isinstance(child, kinds) and child.name == name]
        if not found:
            raise LookupError(f"torchweave/{station.file} has no {station.symbol}")
        node = found[-1]
    if "." not in station.symbol:
        node = module
    assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].replace("`", "").split())
    if not text:
        raise LookupError(f"{station.symbol} in torchweave/{station.file} has no docstring")
    return text


def imports() -> Counter[tuple[str, str]]:
    """Number of files that import another room, by (room, imported room)."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ROOMS:
            continue
        imported = {name.split(".")[1] for name in _imported(path) if name.startswith("torchweave.")} - {room}
        counts.update((room, other) for other in imported if other in ROOMS)
    return counts


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def draw() -> str:
    """The drawing as SVG."""
    lanes = max(len(START), len(STEP)) * (BOX + GAP)
    top = 84
    rooms_top = top + lanes + 36
    parts = [
        _text(MARGIN, 34, "Torchweave: from a folder to a graph, from a prompt to its replay", 20, weight="bold"),
        _text(MARGIN, 64, "Once, before the first request", 15, BLUE, "bold"),
        _text(2 * MARGIN + LANE, 64, "Every step", 15, GREEN, "bold"),
        *_lane(START, MARGIN, top, BLUE),
        *_lane(STEP, 2 * MARGIN + LANE, top, GREEN),
        _crossing(top),
        *_rooms(rooms_top),
    ]
    height = rooms_top + 170
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">',
            "<!-- made by scripts/docs/draw_architecture.py -->",
            f"<defs>{marker}</defs>",
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _lane(stations: tuple[Station, ...], left: int, top: int, color: str) -> Iterator[str]:
    for index, station in enumerate(stations):
        y = top + index * (BOX + GAP)
        yield (
            f'<rect x="{left}" y="{y}" width="{LANE}" height="{BOX}" rx="8" fill="{PALE}" stroke="{color}" '
            'stroke-width="1.5"/>'
        )
        yield _text(left + 14, y + 22, station.symbol, 14, color, "bold", mono=True)
        yield _text(left + LANE - 14, y + 22, f"torchweave/{station.file}", 11, GREY, anchor="end", mono=True)
        lines = textwrap.wrap(paragraph(station), 76, max_lines=2, placeholder=" ...")
        for line, text in enumerate(lines):
            yield _text(left + 14, y + 44 + 18 * line, text, 12.5)
        if index:
            yield _arrow(left + LANE // 2, y - GAP, left + LANE // 2, y - 2)


def _crossing(top: int) -> str:
    """The arrow from recording at start-up to replay in a step."""
    made = next(index for index, station in enumerate(START) if station.symbol == "record")
    used = next(index for index, station in enumerate(STEP) if station.symbol == "Recording.replay")
    x, right = MARGIN + LANE, 2 * MARGIN + LANE
    y_from, y_to = (top + index * (BOX + GAP) + BOX // 2 for index in (made, used))
    path = f"M{x} {y_from}h{MARGIN // 2}V{y_to}H{right - 2}"
    return f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.5" marker-end="url(#tip)"/>'


def _rooms(top: int) -> Iterator[str]:
    """The rooms from top to bottom, each with its imported rooms and the number of importing files."""
    counts = imports()
    yield _text(MARGIN, top, "Rooms: each imports only rooms to its right (files that do)", 15, INK, "bold")
    width = (WIDTH - MARGIN * (len(ROOMS) + 1)) // len(ROOMS)
    for index, room in enumerate(ROOMS):
        left = MARGIN + index * (width + MARGIN)
        yield f'<rect x="{left}" y="{top + 18}" width="{width}" height="126" rx="8" fill="{PALE}" stroke="{GREY}"/>'
        yield _text(left + 10, top + 38, room, 13, INK, "bold", mono=True)
        known = [f"{other} {counts[room, other]}" for other in ROOMS if counts[room, other]]
        for line, text in enumerate(textwrap.wrap(", ".join(known) or "imports no room", 15)):
            yield _text(left + 10, top + 56 + 14 * line, text, 10.5, GREY)


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{GREY}" stroke-width="1.5" marker-end="url(#tip)"/>'


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    fill: str = INK,
    weight: str = "normal",
    anchor: str = "start",
    mono: bool = False,
) -> str:
    family = ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"' if mono else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}"{family}>'
        f"{escape(text)}</text>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "architecture.svg")
    path = parser.parse_args().output
    path.write_text(draw(), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
