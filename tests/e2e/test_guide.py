"""Examples of the guide run as they stand, but for the compiler, which would take longest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
PLAIN = 'LLM("demo", torch_compile_config={"enable_fullgraph": False, "enable_inductor": False})'


def example(section: str) -> str:
    text = GUIDE[GUIDE.index(f"## {section}\n") :]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None and 'LLM("demo")' in found[1]
    return found[1].replace('LLM("demo")', PLAIN)


def test_B1_the_example_of_the_four_callbacks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(example("Drive the batch manager yourself"), "guide.md", "exec"), names)
    assert capsys.readouterr().out.split() == ["42", "859", "1"]
    assert len(names["records"]) > 2  # type: ignore[arg-type]


def test_B7_the_example_of_a_beam_search_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example("Beam search"), "guide.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("42 -")
