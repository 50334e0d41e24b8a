"""Output of two examples of the guide, run without the compiler to save time; test_house.py runs all examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
PLAIN = {
    'LLM("demo")': 'LLM("demo", torch_compile_config={"enable_fullgraph": False, "enable_inductor": False})',
    'EngineConfig("demo")': 'EngineConfig("demo", torch_compile_config=TorchCompileConfig(enable_fullgraph=False))',
}


def run(section: str) -> dict[str, object]:
    """The names that a section's example defines."""
    text = GUIDE[GUIDE.index(f"## {section}\n") :]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None and any(written in found[1] for written in PLAIN)
    code = "from torchweave import TorchCompileConfig\n" + found[1]
    for written, plain in PLAIN.items():
        code = code.replace(written, plain)
    names: dict[str, object] = {}
    exec(compile(code, "guide.md", "exec"), names)
    return names


def test_batch_manager_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("Drive the batch manager yourself")
    assert capsys.readouterr().out.split() == ["42", "859", "1"]
    assert len(names["records"]) > 2  # type: ignore[arg-type]


def test_beam_search_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("Beam search")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("42 -")
