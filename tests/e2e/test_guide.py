"""Examples of pages that need no server, run without the compiler to save time; test_house.py runs those in ```python with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import image_model

DOCS = Path(__file__).parents[2] / "docs"
EAGER = 'torch_compile_config={"enable_fullgraph": False, "enable_inductor": False}'
PLAIN = {
    'LLM("demo"': f'LLM("demo", {EAGER}',
    'EngineConfig("demo")': 'EngineConfig("demo", torch_compile_config=TorchCompileConfig(enable_fullgraph=False))',
}


def examples(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def run(code: str, page: str) -> dict[str, object]:
    """The names that an example defines."""
    if "enforce_eager" not in code:
        assert any(written in code for written in PLAIN)
        for written, plain in PLAIN.items():
            code = code.replace(written, plain)
    names: dict[str, object] = {}
    exec(compile("from torchweave import TorchCompileConfig\n" + code, page, "exec"), names)
    return names


def test_batch_manager_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = "how-to/drive-the-batch-manager.md"
    names = run(examples(page, "python")[0], page)
    assert capsys.readouterr().out.split() == ["42", "859", "1"]
    assert len(names["records"]) > 2  # type: ignore[arg-type]


def test_beam_search_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = "how-to/sample.md"
    run(next(code for code in examples(page, "python") if "beam_width" in code), page)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("42 -")


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("how-to/quantize.md", "42"),
        ("how-to/speculate.md", "one two three"),
        ("how-to/migrate-from-vllm.md", "1 859 -"),
    ],
)
def test_examples_with_options_run(page: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    for code in examples(page, "py"):
        run(code, page)
    assert printed in capsys.readouterr().out


def test_image_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image_model.save(tmp_path / "model")
    image_model.picture(0).save(tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)
    [code] = examples("how-to/send-images.md", "py")
    exec(compile(code.replace('LLM("MODEL"', f'LLM("model", device="cpu", {EAGER}'), "send-images.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
