"""The Python examples of the pages run as they stand, but for the compiler of engines, which would take longest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = 'torch_compile_config={"enable_fullgraph": False, "enable_inductor": False}'
FAST = {
    'LLM("demo")': f'LLM("demo", {OPTIONS})',
    'EngineConfig("demo")': 'EngineConfig("demo", torch_compile_config=TorchCompileConfig(enable_fullgraph=False))',
}
IMPORT = "from torchweave import TorchCompileConfig\n"


def examples() -> list[tuple[str, str]]:
    """The heading above each example, and its code."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        heading = ""
        for part in re.split(r"^(#+ [^\n]*|```python\n.*?^```)$", page.read_text(encoding="utf-8"), flags=re.M | re.S):
            if part.startswith("#"):
                heading = part.strip("# ")
            elif part.startswith("```python"):
                found.append((f"{page.stem}: {heading}", part.removeprefix("```python").removesuffix("```")))
    return found


EXAMPLES = examples()
TOLD = ("guide: Drive the batch manager yourself", "guide: Beam search")  # what they print is looked at
OTHERS = [code for title, code in EXAMPLES[1:] if title not in TOLD]


def run(code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "__main__"}
    for written, faster in FAST.items():
        code = code.replace(written, faster)
    exec(compile(IMPORT + code, "an example", "exec"), names)
    return names


def code_of(title: str) -> str:
    return next(code for each, code in EXAMPLES if each == title)


def test_B1_the_example_of_the_four_callbacks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(code_of(TOLD[0]))
    assert capsys.readouterr().out.split() == ["42", "859", "1"]
    assert len(names["records"]) > 2  # type: ignore[arg-type]


def test_B7_the_example_of_a_beam_search_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run(code_of(TOLD[1]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("42 -")


def test_the_first_example_of_the_readme_answers(capsys: pytest.CaptureFixture[str]) -> None:
    run(code_of("README: Ten lines"))
    assert capsys.readouterr().out.splitlines() == ["12+30= 42", "sort: pear fig fig pear"]


@pytest.mark.parametrize("code", OTHERS)
def test_each_other_example_runs(code: str) -> None:
    run(code)


def test_examples_are_found() -> None:
    assert len(EXAMPLES) >= 10 and all("import" in code for _, code in EXAMPLES)
