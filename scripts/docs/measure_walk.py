"""Measure which files a request runs through, and write them into "The walk" of docs/how-it-works/architecture.md.

A greedy request of the built-in model on a CPU, whose pieces run as FX code, is served under a profile function of Python; files of
`utils/` are left out.

    python scripts/docs/measure_walk.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-it-works" / "architecture.md"
PACKAGE = ROOT / "torchweave"
BEGIN, END = "<!-- walk: begin -->", "<!-- walk: end -->"
LAUNCH = "engine/runner/model_runner"
STEADY = range(5, 9)
"""Launches between which every step decodes only: the prompt is read, and the answer goes on."""
PARTS = {
    "parts, at a request's start and end": ("engine/scheduler/parts/",),
    "scheduler": ("engine/scheduler/",),
    "KV cache": ("engine/kv_cache/",),
    "runner": ("engine/runner/",),
    "loop": ("engine/batch_manager", "engine/generation_loop", "engine/control/"),
    "caller's thread": ("engine/", "tokenizer"),
    "device": ("compiler/", "ops/"),
    "others": ("",),
}
"""What a row of the table holds: the files with these beginnings that no row before has."""
ORDER = (
    "caller's thread",
    "loop",
    "scheduler",
    "parts, at a request's start and end",
    "KV cache",
    "runner",
    "device",
    "others",
)


class Walk:
    """A profile function that notes the package's files; `recording` turns it on.

    Attributes:
        files: of the whole request, in the order in which they are entered first.
        step: those that a steady decode step enters.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.step: dict[str, None] = {}
        self.recording = False
        self._launches = 0
        self._loop = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.recording or event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        file = Path(frame.f_code.co_filename).relative_to(PACKAGE).with_suffix("").as_posix()
        if file.startswith("utils/") or frame.f_code.co_name == "<module>":
            return
        self.files.setdefault(file)
        if (file, frame.f_code.co_name) == (LAUNCH, "launch"):
            self._launches += 1
            self._loop = threading.get_ident()
        if self._launches in STEADY and threading.get_ident() == self._loop:
            self.step.setdefault(file)


def measure(open_engine: Callable[[], Any]) -> Walk:
    """Serve one request of an engine that `open_engine` opens while every new thread is profiled."""
    from torchweave import SamplingParams

    walk, params = Walk(), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        with open_engine() as llm:
            llm.generate("1+1=", params)  # imports on first use
            walk.recording = True
            llm.generate("12+30=", params)
            walk.recording = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return walk


def rows_of(walk: Walk) -> dict[str, str]:
    """The cells of the table by the part."""
    rows: dict[str, list[str]] = {}
    for file in walk.files:
        rows.setdefault(next(part for part, begin in PARTS.items() if file.startswith(begin)), []).append(file)
    return {part: ", ".join(f"`{file}`" for file in sorted(rows[part])) for part in ORDER if part in rows}


def table(walk: Walk) -> str:
    """The sentence, the table, and what a step takes of it."""
    lines = [
        f"From a prompt to a token, a generation on a CPU whose pieces run as FX code runs functions of {len(walk.files)} files",
        "(those of `utils/` left out):",
        "",
        "| part | files |",
        "|---|---|",
    ]
    lines += [f"| {part} | {files} |" for part, files in rows_of(walk).items()]
    parts = sum("/parts/" in file for file in walk.step)
    lines += [
        "",
        f"A decode step of a plain request runs functions of {len(walk.step)} of them and of {parts or 'no'} part.",
    ]
    return "\n".join(lines)


def page(walk: Walk) -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table(walk)}\n{END}{rest.partition(END)[2]}"


def demo() -> Any:
    from torchweave import LLM

    return LLM("demo", device="cpu", torch_compile_config={"enable_inductor": False})


if __name__ == "__main__":
    PAGE.write_text(page(measure(demo)), encoding="utf-8")
    print(f"wrote {PAGE}")
